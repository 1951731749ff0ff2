// What the producer knows of its slots, in its own memory: the file is for others to read.
#ifndef HSXFER_SLOT_LISTS_H
#define HSXFER_SLOT_LISTS_H

#include <cstdint>
#include <string>
#include <vector>

namespace hsx {

constexpr uint32_t kNoSlot = UINT32_MAX;

enum Phase : uint8_t {
  kUnused,    // never taken
  kWriting,   // open
  kSealing,   // its seal is queued; no further copies
  kUnread,    // ready
  kBroken,    // failed: a description without data
  kDraining,  // retired, but somebody still holds a lease
  kGone,      // retired, its extent free
  kNumPhases,
};

struct SlotInfo {
  uint64_t generation = 0;
  uint64_t extent_offset = 0, extent_bytes = 0;
  uint64_t data_offset = 0, data_bytes = 0;  // in the extent
  uint64_t payload_bytes = 0;
  uint64_t marks_offset = 0, num_marks = 0;  // watermarks, in the data
  uint64_t key_hash = 0;
  uint64_t settled_us = 0;  // when it became ready or failed
  uint32_t key_bytes = 0, head_bytes = 0;
  uint32_t tail_offset = 0, tail_capacity_bytes = 0;
  uint32_t consumers = 0;
  Phase phase = kUnused;
  bool listed = false;  // in the directory
  uint32_t before = kNoSlot, after = kNoSlot;
  std::string error;  // of the device, while a copy was on its way here
};

// A list a phase, oldest first; every slot is in the list of its phase.
class SlotLists {
 public:
  explicit SlotLists(uint32_t num_slots) : slots_(num_slots) {
    for (uint32_t i = 0; i < num_slots; ++i) push(i, kUnused);
  }
  SlotInfo& operator[](uint32_t index) { return slots_[index]; }
  uint32_t size() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t first(Phase phase) const { return lists_[phase].first; }
  uint32_t count(Phase phase) const { return lists_[phase].count; }

  void move(uint32_t index, Phase phase) {
    SlotInfo& slot = slots_[index];
    List& list = lists_[slot.phase];
    (slot.before == kNoSlot ? list.first : slots_[slot.before].after) = slot.after;
    (slot.after == kNoSlot ? list.last : slots_[slot.after].before) = slot.before;
    --list.count;
    push(index, phase);
  }

  // f may move the slot that it gets.
  template <class F>
  void each(Phase phase, F&& f) {
    for (uint32_t index = lists_[phase].first; index != kNoSlot;) {
      uint32_t next = slots_[index].after;
      f(index);
      index = next;
    }
  }

 private:
  struct List {
    uint32_t first = kNoSlot, last = kNoSlot, count = 0;
  };

  void push(uint32_t index, Phase phase) {
    List& list = lists_[phase];
    slots_[index].phase = phase;
    slots_[index].before = list.last;
    slots_[index].after = kNoSlot;
    (list.last == kNoSlot ? list.first : slots_[list.last].after) = index;
    list.last = index;
    ++list.count;
  }

  std::vector<SlotInfo> slots_;
  List lists_[kNumPhases];
};

}  // namespace hsx

#endif
