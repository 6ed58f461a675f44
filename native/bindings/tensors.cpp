#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include "bindings/tensors.hpp"

#include <numpy/ndarraytypes.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace nb = nanobind;

namespace unisono {

namespace {

// ---- DLPack, version 1.3: https://dmlc.github.io/dlpack ---------------------------------------

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeAPI {
  uint32_t major, minor;
  const ExchangeAPI* previous;  // of an older major version
  void* others[3];
  // Fill in what the object has, without waiting for its device. -1: an exception is set.
  int (*read)(void* object, DLTensor* into);
};

constexpr int32_t kCPU = 1;
// Linux maps no page below it (vm.mmap_min_addr).
constexpr uintptr_t kLowestAddress = 1 << 16;
constexpr uint8_t kComplex = 5;

// ---- torch ------------------------------------------------------------------------------------

struct DType {
  const char* name;
  int numpy_type;  // -1: NumPy has no such dtype
};

// The dtypes that unisono knows. Python converts the others.
constexpr std::array<DType, 19> kDTypes{{
  {"float32", NPY_FLOAT32},       {"bfloat16", -1},         {"float16", NPY_FLOAT16},
  {"int64", NPY_INT64},           {"float64", NPY_FLOAT64}, {"int32", NPY_INT32},
  {"uint8", NPY_UINT8},           {"bool", NPY_BOOL},       {"int8", NPY_INT8},
  {"int16", NPY_INT16},           {"uint16", NPY_UINT16},   {"uint32", NPY_UINT32},
  {"uint64", NPY_UINT64},         {"float8_e4m3fn", -1},    {"float8_e5m2", -1},
  {"float8_e4m3fnuz", -1},        {"float8_e5m2fnuz", -1},  {"complex64", NPY_COMPLEX64},
  {"complex128", NPY_COMPLEX128},
}};

// Objects of torch. Guarded by the interpreter lock; kept until the process ends.
struct Torch {
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  PyObject *is_neg = nullptr, *is_conj = nullptr, *storage = nullptr;  // methods of tensors
  std::array<PyObject*, kDTypes.size()> dtypes{};
  const ExchangeAPI* api = nullptr;
};

const ExchangeAPI* api_of(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  const void* const found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  const auto* api = static_cast<const ExchangeAPI*>(found);
  while (api != nullptr && api->major > 1) api = api->previous;
  return api != nullptr && api->major == 1 && api->read != nullptr ? api : nullptr;
}

// Find torch if the program has imported it.
bool find(Torch* into) {
  const nb::object name = nb::steal(PyUnicode_InternFromString("torch"));
  const nb::object torch = nb::steal(PyImport_GetModule(name.ptr()));
  if (!torch.is_valid()) return false;
  try {
    const auto kept = [](nb::object object) { return object.release().ptr(); };
    const nb::object tensor = torch.attr("Tensor"), parameter = torch.attr("nn").attr("Parameter");
    const ExchangeAPI* const api = api_of(tensor);
    if (api == nullptr) return false;
    into->is_neg = kept(tensor.attr("is_neg"));
    into->is_conj = kept(tensor.attr("is_conj"));
    into->storage = kept(tensor.attr("untyped_storage"));
    for (size_t i = 0; i < kDTypes.size(); ++i) {
      into->dtypes[i] = kept(nb::getattr(torch, kDTypes[i].name, nb::none()));
    }
    into->parameter = reinterpret_cast<PyTypeObject*>(kept(parameter));
    into->tensor = reinterpret_cast<PyTypeObject*>(kept(tensor));
    into->api = api;
    return true;
  } catch (nb::python_error&) {
    // An import that goes on, or has failed.
    return false;
  }
}

Torch torch;

// Whether a method without arguments returns False.
bool is_false(PyObject* method, PyObject* self) {
  const nb::object result = nb::steal(PyObject_Vectorcall(method, &self, 1, nullptr));
  return result.ptr() == Py_False;
}

bool is_contiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim; i-- > 0 && tensor.strides != nullptr;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

bool is_tensor(PyObject* object) {
  if (torch.api == nullptr && !find(&torch)) {
    PyErr_Clear();
    return false;
  }
  return Py_TYPE(object) == torch.tensor || Py_TYPE(object) == torch.parameter;
}

bool read_tensor(PyObject* tensor, Elements* into) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  // Not by DLPack's numbers, which are the same for uint4 and uint8.
  const nb::object dtype = nb::steal(PyObject_GetAttr(tensor, dtype_name));
  auto* const found = std::find(torch.dtypes.begin(), torch.dtypes.end(), dtype.ptr());
  // Before the memory is read, because torch may release the interpreter lock in a method.
  const bool plain = found != torch.dtypes.end() && is_false(torch.is_neg, tensor);
  DLTensor read{};
  if (!plain || torch.api->read(tensor, &read) != 0 ||
      (read.code == kComplex &&
       (!is_false(torch.is_conj, tensor) || torch.api->read(tensor, &read) != 0))) {
    PyErr_Clear();
    return false;
  }
  const int64_t itemsize = read.bits / 8;
  // A view of freed memory has its offset as address.
  const bool freed = reinterpret_cast<uintptr_t>(read.data) < kLowestAddress;
  if (read.device_type != kCPU || freed || read.lanes != 1) return false;
  into->data = static_cast<char*>(read.data) + read.byte_offset;
  if (reinterpret_cast<uintptr_t>(into->data) % std::min<uintptr_t>(itemsize, 8) != 0) return false;
  into->nbytes = into->itemsize = itemsize;
  for (int i = 0; i < read.ndim; ++i) into->nbytes *= read.shape[i];
  const auto number = static_cast<int>(found - torch.dtypes.begin());
  into->numpy_type = kDTypes[static_cast<size_t>(number)].numpy_type;
  into->dtype = into->numpy_type < 0 ? -1 - number : into->numpy_type;
  into->dimensions = read.ndim;
  into->shape = read.shape;
  into->strides = is_contiguous(read) ? nullptr : read.strides;
  return true;
}

nb::object storage_of(PyObject* tensor) {
  nb::object storage = nb::steal(PyObject_Vectorcall(torch.storage, &tensor, 1, nullptr));
  if (!storage.is_valid()) throw nb::python_error();
  return storage;
}

}  // namespace unisono
