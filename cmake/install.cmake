# The core as a CMake package, for engines in C++: find_package(remap CONFIG) and remap::core.
#
#   P/include/remap/*.h  P/lib/libremap_core.a  P/lib/cmake/remap/*.cmake  P/share/doc/remap/LICENSE
#
# Everything is in the component `cpp`; the wheel takes the component `python` alone. No installed file names a path of the
# machine that built it, so that P may be moved or packed.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(remap_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/remap")
set_target_properties(remap_core PROPERTIES EXPORT_NAME core)

# A static library that was compiled with a sanitizer does not link without its runtime, so the flag goes to whoever links it:
# to the linker alone. Its own sources are instrumented only if it asks for that itself, with the same compiler. Where the
# sanitizer is thread it has to: reference counts that it changes in inline code are seen by nobody else, and reported as races.
if(REMAP_SANITIZE)
  target_link_options(remap_core INTERFACE "$<INSTALL_INTERFACE:-fsanitize=${REMAP_SANITIZE}>")
endif()

install(TARGETS remap_core EXPORT remapTargets
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/remap" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT cpp
        FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/remap" COMPONENT cpp)
install(EXPORT remapTargets NAMESPACE remap:: DESTINATION "${remap_cmake_dir}" COMPONENT cpp)

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/remapConfig.cmake.in" "${PROJECT_BINARY_DIR}/remapConfig.cmake"
                              INSTALL_DESTINATION "${remap_cmake_dir}" PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
# Before 1.0 a minor version may change the API.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/remapConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/remapConfig.cmake" "${PROJECT_BINARY_DIR}/remapConfigVersion.cmake"
        DESTINATION "${remap_cmake_dir}" COMPONENT cpp)
