// Which parts of the region are free. Lives in the producer's own memory: nothing of it is in the file.
#ifndef HSXFER_EXTENTS_H
#define HSXFER_EXTENTS_H

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace hsx {

class Extents {
 public:
  explicit Extents(uint64_t region_bytes);

  // Offset of the smallest free piece that holds `bytes`, or kNone. Multiples of 256 in, multiples of 256 out.
  uint64_t allocate(uint64_t bytes);
  void release(uint64_t offset, uint64_t bytes);

  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t largest_free_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  const std::map<uint64_t, uint64_t>& free_pieces() const { return by_offset_; }  // offset -> bytes

  static constexpr uint64_t kNone = UINT64_MAX;

 private:
  void add(uint64_t offset, uint64_t bytes);
  void remove(std::map<uint64_t, uint64_t>::iterator piece);

  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // bytes, offset
  uint64_t used_bytes_ = 0;
};

}  // namespace hsx

#endif
