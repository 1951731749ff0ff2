#include "extents.h"

#include <iterator>

namespace hsx {

Extents::Extents(uint64_t region_bytes) { add(0, region_bytes); }

uint64_t Extents::allocate(uint64_t bytes) {
  auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) return kNone;
  auto [found_bytes, offset] = *fit;
  remove(by_offset_.find(offset));
  if (found_bytes > bytes) add(offset + bytes, found_bytes - bytes);
  used_bytes_ += bytes;
  return offset;
}

void Extents::release(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  used_bytes_ -= bytes;
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove(before);
    }
  }
  if (next != by_offset_.end() && offset + bytes == next->first) {
    bytes += next->second;
    remove(next);
  }
  add(offset, bytes);
}

void Extents::add(uint64_t offset, uint64_t bytes) {
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void Extents::remove(std::map<uint64_t, uint64_t>::iterator piece) {
  by_size_.erase({piece->second, piece->first});
  by_offset_.erase(piece);
}

}  // namespace hsx
