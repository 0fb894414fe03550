// SPDX-License-Identifier: Apache-2.0
// One-dimensional uint8 tensors over addresses of a region, by DLPack: zero-copy for torch, numpy and others, without
// linking any of them. The structures below are the public DLPack ABI, version 1.0.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "common.h"
#include "remap/arena.h"
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

// The object that a tensor keeps alive until it is gone, on whatever thread that is. A Lease needs no interpreter for its end;
// another object does, and is left alone when the interpreter is ending: its memory goes with the process.
class Keep {
 public:
  explicit Keep(const py::object& owner) {
    if (py::isinstance<Lease>(owner)) {
      lease_ = owner.cast<std::shared_ptr<Lease>>();
    } else {
      owner_ = owner.inc_ref().ptr();
    }
  }
  ~Keep() {
    if (owner_ == nullptr || Py_IsInitialized() == 0 || interpreter_ends()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(owner_);
  }
  Keep(const Keep&) = delete;
  Keep& operator=(const Keep&) = delete;

 private:
  std::shared_ptr<Lease> lease_;
  PyObject* owner_ = nullptr;
};

template <typename Managed>
struct Export {
  explicit Export(const py::object& owner) : keep(owner) {}
  Managed managed{};
  std::int64_t shape = 0;
  std::int64_t stride = 1;
  Keep keep;
};

template <typename Managed>
void delete_export(Managed* managed) {
  delete static_cast<Export<Managed>*>(managed->manager_ctx);
}

template <typename Managed>
Managed* make_export(std::uintptr_t address, std::size_t bytes, DLDevice device, const py::object& owner) {
  auto self = std::make_unique<Export<Managed>>(owner);
  self->shape = static_cast<std::int64_t>(bytes);
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
  // A consumer renames the capsule; under its first name no consumer took the tensor and it is ours to delete.
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (managed != nullptr) managed->deleter(managed);
}

class BytesView {
 public:
  BytesView(std::uintptr_t address, std::size_t bytes, py::object owner, const std::string& kind, std::int32_t index)
      : address_(address), bytes_(bytes), device_{kind == "cuda" ? kCuda : kCpu, kind == "cuda" ? index : 0},
        owner_(std::move(owner)) {
    const auto most = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
    if ((address == 0 && bytes != 0) || bytes > most || address + bytes < address || index < 0 ||
        (kind != "host" && kind != "cuda")) {
      throw Error(ErrorKind::invalid_argument,
                  "Expected an address, a size that ends within the address space, and a device of kind host or cuda with an index "
                  "from 0. Nothing was made.",
                  {{"address", static_cast<std::int64_t>(address)},
                   {"nbytes", static_cast<std::int64_t>(bytes)},
                   {"kind", kind},
                   {"index", std::int64_t{index}}});
    }
    if (!py::isinstance<Lease>(owner_)) return;
    const auto lease = owner_.cast<std::shared_ptr<Lease>>();
    const std::uintptr_t begin = to_int(lease->address());
    if (address < begin || address - begin > lease->bytes() || bytes > lease->bytes() - (address - begin)) {
      throw Error(ErrorKind::invalid_argument, "The range does not lie in what its owner holds. Nothing was made.",
                  {{"address", static_cast<std::int64_t>(address)}, {"nbytes", static_cast<std::int64_t>(bytes)}});
    }
  }
  py::typing::Tuple<py::int_, py::int_> device() const { return py::make_tuple(device_.device_type, device_.device_id); }

  // `stream=` is accepted and needs nothing: exporting enqueues no work, and who may use the bytes when is ordered by wait().

  py::object dlpack(const py::KWArgs<py::object>& arguments) const {
    bool versioned = false;
    if (arguments.contains("max_version") && !arguments["max_version"].is_none()) {
      const py::sequence version = py::cast<py::sequence>(arguments["max_version"]);
      versioned = py::cast<long long>(version[0]) >= 1;
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

// Lets the kernel look, which says "bad address" where a look of our own would end the process.
void require_writable(std::uintptr_t address, std::size_t bytes) {
  const auto refuse = [&] {
    throw Error(ErrorKind::invalid_argument, "Not all of the range can be written. Nothing changed.",
                {{"address", static_cast<std::int64_t>(address)}, {"nbytes", static_cast<std::int64_t>(bytes)}});
  };
  if (bytes == 0) return;
  if (address == 0 || address + (bytes - 1) < address) refuse();
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(ErrorKind::limit_exceeded, "No pipe to look at memory through. Nothing changed.", {{"errno", std::int64_t{errno}}});
  }
  const auto grain = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  bool writable = true;
  std::uintptr_t at = address;
  while (writable) {
    void* place = reinterpret_cast<void*>(at);
    writable = ::write(ends[1], place, 1) == 1 && ::read(ends[0], place, 1) == 1;
    if (address + (bytes - 1) - at < grain - at % grain) break;  // the last OS page
    at += grain - at % grain;
  }
  ::close(ends[0]);
  ::close(ends[1]);
  if (!writable) refuse();
}

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
        if (value < 0 || value > 255) {
          throw Error(ErrorKind::invalid_argument, "A byte is 0 to 255. Nothing changed.", {{"value", std::int64_t{value}}});
        }
        require_writable(address, bytes);
        std::memset(reinterpret_cast<void*>(address), value, bytes);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("value"), ReleaseGil(), "Host-addressable memory only (tests: poison).");
}

}  // namespace remap::python
