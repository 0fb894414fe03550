// One-dimensional uint8 tensors over addresses of a region, by DLPack: zero-copy for torch, numpy and others, without
// linking any of them. The structures below are the public DLPack ABI, version 1.0.
#include <cstdint>
#include <cstring>
#include <memory>

#include "common.h"
#include "remap/error.h"

namespace remap::python {
namespace {

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;

// Keeps the owner (the arena's backend) alive until the last tensor over it is gone; then the consumer calls the deleter.
template <typename Managed>
struct Export {
  Managed managed{};
  std::int64_t shape = 0;
  std::int64_t stride = 1;
  PyObject* owner = nullptr;
};

template <typename Managed>
void delete_export(Managed* managed) {
  auto* self = static_cast<Export<Managed>*>(managed->manager_ctx);
  if (Py_IsInitialized() != 0) {  // after the interpreter is gone there is no reference left to drop
    py::gil_scoped_acquire gil;
    Py_DECREF(self->owner);
  }
  delete self;
}

template <typename Managed>
Managed* make_export(std::uintptr_t address, std::size_t bytes, DLDevice device, const py::object& owner) {
  auto self = std::make_unique<Export<Managed>>();
  self->shape = static_cast<std::int64_t>(bytes);
  self->owner = owner.inc_ref().ptr();
  DLTensor& tensor = self->managed.dl_tensor;
  tensor.data = reinterpret_cast<void*>(address);
  tensor.device = device;
  tensor.ndim = 1;
  tensor.dtype = {1, 8, 1};  // unsigned integer, 8 bits, one lane
  tensor.shape = &self->shape;
  tensor.strides = &self->stride;
  self->managed.manager_ctx = self.get();
  self->managed.deleter = delete_export<Managed>;
  return &self.release()->managed;
}

template <typename Managed>
void destroy_unused(PyObject* capsule, const char* name) {
  // A consumer renames the capsule; under its first name nobody took the tensor and it is ours to delete.
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (managed != nullptr) managed->deleter(managed);
}

class BytesView {
 public:
  BytesView(std::uintptr_t address, std::size_t bytes, py::object owner, const std::string& kind, std::int32_t index)
      : address_(address), bytes_(bytes), device_{kind == "cuda" ? kCuda : kCpu, kind == "cuda" ? index : 0},
        owner_(std::move(owner)) {}
  py::tuple device() const { return py::make_tuple(device_.device_type, device_.device_id); }

  // `stream=` is accepted and needs nothing: exporting enqueues no work, and who may use the bytes when is ordered by wait().

  py::object dlpack(const py::kwargs& arguments) const {
    bool versioned = false;
    if (arguments.contains("max_version") && !arguments["max_version"].is_none()) {
      versioned = py::cast<py::tuple>(arguments["max_version"])[0].cast<int>() >= 1;
    }
    if (versioned) {
      auto* managed = make_export<DLManagedTensorVersioned>(address_, bytes_, device_, owner_);
      managed->version = {1, 0};
      managed->flags = 0;
      return py::reinterpret_steal<py::object>(PyCapsule_New(managed, "dltensor_versioned", [](PyObject* capsule) {
        destroy_unused<DLManagedTensorVersioned>(capsule, "dltensor_versioned");
      }));
    }
    auto* managed = make_export<DLManagedTensor>(address_, bytes_, device_, owner_);
    return py::reinterpret_steal<py::object>(PyCapsule_New(
        managed, "dltensor", [](PyObject* capsule) { destroy_unused<DLManagedTensor>(capsule, "dltensor"); }));
  }

 private:
  std::uintptr_t address_;
  std::size_t bytes_;
  DLDevice device_;
  py::object owner_;
};

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<BytesView>(module, "BytesView",
                        "A range of device memory as a one-dimensional uint8 tensor for from_dlpack(); keeps `owner` alive.")
      .def(py::init<std::uintptr_t, std::size_t, py::object, const std::string&, std::int32_t>(), py::arg("address"),
           py::arg("nbytes"), py::arg("owner"), py::arg("kind") = "host", py::arg("index") = 0)
      .def("__dlpack__", &BytesView::dlpack)
      .def("__dlpack_device__", &BytesView::device);
  module.def(
      "buffer_address",
      [](const py::buffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.request(false).ptr); }, py::arg("buffer"),
      "Where a buffer's bytes are. The caller keeps the buffer alive.");
  module.def(
      "fill_bytes",
      [](std::uintptr_t address, std::size_t bytes, int value) {
        std::memset(reinterpret_cast<void*>(address), value, bytes);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("value"), ReleaseGil(), "Host-addressable memory only (tests: poison).");
}

}  // namespace remap::python
