// Two declarations of one function, compared without the types behind pointers.
#pragma once

#include <type_traits>

namespace remap::testing {

// Passed in the same way: both pointers, or both integers (or enumerations) of one size.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using To = std::remove_pointer_t<Ours>;
    using From = std::remove_pointer_t<Theirs>;
    constexpr bool scalars = (std::is_arithmetic_v<To> || std::is_enum_v<To>) &&
                             (std::is_arithmetic_v<From> || std::is_enum_v<From>);
    if constexpr (scalars) {
      return sizeof(To) == sizeof(From) && std::is_floating_point_v<To> == std::is_floating_point_v<From> &&
             std::is_const_v<To> == std::is_const_v<From>;
    } else {
      return std::is_pointer_v<To> == std::is_pointer_v<From> && std::is_void_v<To> == std::is_void_v<From> &&
             std::is_const_v<To> == std::is_const_v<From>;
    }
  } else {
    return std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
  }
}

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return alike<OurResult, TheirResult>() && (alike<Ours, Theirs>() && ... && true);
    }
  }();
};

}  // namespace remap::testing
