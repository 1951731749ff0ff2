#include "directory.h"

#include <sched.h>

#include <atomic>

namespace hsx {

DirectoryWriter::Change::Change(DirectoryWriter& directory) : directory_(directory) {
  store_relaxed(*directory_.version_, load_relaxed(*directory_.version_) + 1);
  std::atomic_thread_fence(std::memory_order_release);  // odd before any entry
}

DirectoryWriter::Change::~Change() { store_release(*directory_.version_, load_relaxed(*directory_.version_) + 1); }

void DirectoryWriter::Change::insert(uint64_t hash, uint32_t slot) {
  uint32_t at = hash & directory_.mask_;
  while (directory_.entries_[at].slot_plus_1 != 0) at = (at + 1) & directory_.mask_;
  directory_.put(at, hash, slot + 1);
}

void DirectoryWriter::Change::erase(uint64_t hash, uint32_t slot) {
  const DirectoryEntry* entries = directory_.entries_;
  uint32_t mask = directory_.mask_, hole = hash & mask;
  while (entries[hole].slot_plus_1 != slot + 1) hole = (hole + 1) & mask;
  // Whatever a look-up would now miss behind the hole moves into it, so no tombstones are left.
  for (uint32_t at = (hole + 1) & mask; entries[at].slot_plus_1 != 0; at = (at + 1) & mask) {
    uint32_t home = entries[at].key_hash & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    directory_.put(hole, entries[at].key_hash, entries[at].slot_plus_1);
    hole = at;
  }
  directory_.put(hole, 0, 0);
}

void DirectoryWriter::put(uint32_t at, uint64_t hash, uint32_t slot_plus_1) {
  store_relaxed(entries_[at].key_hash, hash);
  store_relaxed(entries_[at].slot_plus_1, slot_plus_1);
}

std::vector<uint32_t> DirectoryWriter::find(uint64_t hash) const {
  std::vector<uint32_t> slots;
  for (uint32_t at = hash & mask_; entries_[at].slot_plus_1 != 0; at = (at + 1) & mask_)
    if (entries_[at].key_hash == hash) slots.push_back(entries_[at].slot_plus_1 - 1);
  return slots;
}

bool directory_lookup(const DirectoryEntry* entries, uint32_t num_entries, const uint32_t* version, uint64_t hash,
                      std::vector<uint32_t>* slots) {
  constexpr int kTries = 64;  // a change takes under a microsecond; a producer that lost its core in one takes longer
  for (int i = 0; i < kTries; ++i) {
    if (i > kTries / 2) sched_yield();
    uint32_t before = load_acquire(*version);
    if (before & 1) continue;
    slots->clear();
    uint32_t mask = num_entries - 1, at = hash & mask;
    for (uint32_t step = 0; step < num_entries; ++step, at = (at + 1) & mask) {  // bounded: the file may be hostile
      uint32_t slot_plus_1 = load_relaxed(entries[at].slot_plus_1);
      if (slot_plus_1 == 0) break;
      if (load_relaxed(entries[at].key_hash) == hash) slots->push_back(slot_plus_1 - 1);
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // entries before the second look at the version
    if (load_relaxed(*version) == before) return true;
  }
  return false;
}

}  // namespace hsx
