// The checksum of a small tensor on the CPU: the CRC-32 of its bytes, as in sac/checksums.py, which uses zlib's.
#pragma once

#include "tape.h"

#include <array>

namespace sac {

constexpr size_t SMALL_BYTES = 1 << 16;  // as in sac/checksums.py

// For eight bytes at a time: table k holds the remainders of a byte that is followed by k others.
inline const std::array<std::array<uint32_t, 256>, 8>& crc_tables() {
  static const auto* tables = [] {
    auto* made = new std::array<std::array<uint32_t, 256>, 8>();
    for (uint32_t byte = 0; byte < 256; byte++) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; bit++) value = value & 1 ? (value >> 1) ^ 0xEDB88320u : value >> 1;
      (*made)[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
      for (int k = 1; k < 8; k++) {
        const uint32_t before = (*made)[k - 1][byte];
        (*made)[k][byte] = (before >> 8) ^ (*made)[0][before & 255];
      }
    return made;
  }();
  return *tables;
}

inline uint32_t crc_of(const unsigned char* data, size_t size) {
  const auto& t = crc_tables();
  uint32_t crc = 0xFFFFFFFFu;
  for (; size >= 8; size -= 8, data += 8) {
    const uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | static_cast<uint32_t>(data[3]) << 24);
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^ t[3][data[4]] ^
          t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
  }
  for (; size > 0; size--, data++) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255];
  return ~crc;
}

// The checksum of a tensor, or -1 if Python has to compute it; see `_of_plain` in sac/checksums.py.
inline int64_t checksum_of(const Tensor& tensor, bool in_order) {
  const TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has(c10::DispatchKey::Python) || tensor.layout() != at::kStrided || !tensor.is_cpu() ||
      tensor.is_quantized() || tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() || !impl->has_storage())
    return -1;
  if (!tensor.is_contiguous() && (in_order || !tensor.is_non_overlapping_and_dense())) return -1;
  const size_t size = tensor.nbytes();
  if (size > SMALL_BYTES) return -1;
  return size == 0 ? 0 : crc_of(static_cast<const unsigned char*>(tensor.const_data_ptr()), size);
}

// Put the checksum of a tensor under `key`; 0 if Python has to compute it, -1 for an error.
inline int put_checksum(PyObject* checksums, PyObject* key, const Tensor& tensor, bool in_order) {
  const int64_t sum = checksum_of(tensor, in_order);
  if (sum < 0) return 0;
  PyObject* sums = Py_BuildValue("(L)", static_cast<long long>(sum));
  const int failed = sums == nullptr ? -1 : PyDict_SetItem(checksums, key, sums);
  Py_XDECREF(sums);
  return failed < 0 ? -1 : 1;
}

// A list of pairs of handle and value, the checksums by handle, whether strides may differ: return the pairs that differ,
// and those that Python has to compare.
inline PyObject* find_different(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *different = PyList_New(0), *others = PyList_New(0);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
    PyObject* pair = PyList_GET_ITEM(args[0], i);
    PyObject *key = PyTuple_GetItem(pair, 0), *value = PyTuple_GetItem(pair, 1);
    PyObject* sums = key != nullptr ? PyDict_GetItem(args[1], key) : nullptr;
    const int64_t now = value != nullptr && THPVariable_Check(value)
                            ? checksum_of(THPVariable_Unpack(value), args[2] == Py_True)
                            : -1;
    if (now < 0 || sums == nullptr || PyTuple_GET_SIZE(sums) != 1 || !PyLong_Check(PyTuple_GET_ITEM(sums, 0))) {
      PyList_Append(others, pair);
    } else if (PyLong_AsLongLong(PyTuple_GET_ITEM(sums, 0)) != now) {
      PyList_Append(different, pair);
    }
  }
  return Py_BuildValue("(NN)", different, others);
  END_HANDLE_TH_ERRORS
}

inline PyObject* crc32(PyObject*, PyObject* data) {  // of bytes, for a test
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0) return nullptr;
  return PyLong_FromUnsignedLong(crc_of(reinterpret_cast<unsigned char*>(bytes), static_cast<size_t>(size)));
}

}  // namespace sac
