#include "reader.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "directory.h"
#include "error.h"
#include "futex.h"

namespace hsx {
namespace {

// A slot's description as its header and extent give it, read once each and checked against the region.
struct Description {
  const uint8_t* key;
  const uint8_t* head;
  const uint8_t* tail;
  const uint8_t* data;
  uint64_t generation, sequence, data_bytes, payload_bytes;
  uint32_t key_bytes, head_bytes, tail_bytes, consumers;
};

bool describe(const ArenaView& view, uint32_t index, Description* out) {
  const SlotHeader& slot = view.slot(index);
  uint64_t region_bytes = view.geometry().region_bytes;
  uint64_t offset = load_relaxed(slot.extent_offset), bytes = load_acquire(slot.extent_bytes);
  if (offset % kAlignBytes != 0 || offset > region_bytes || bytes > region_bytes - offset ||
      bytes < sizeof(ExtentHeader))
    return false;
  const uint8_t* base = view.region() + offset;
  auto& shared = *reinterpret_cast<const ExtentHeader*>(base);
  const uint32_t tail_offset = load_relaxed(shared.tail_offset);
  const uint32_t tail_capacity = load_relaxed(shared.tail_capacity_bytes);
  const uint64_t data_offset = load_relaxed(shared.data_offset);
  out->generation = load_relaxed(slot.generation);
  out->sequence = load_relaxed(slot.sequence);
  out->consumers = load_relaxed(slot.consumers);
  out->key_bytes = load_relaxed(slot.key_bytes);
  out->head_bytes = load_relaxed(slot.head_bytes);
  out->tail_bytes = load_relaxed(slot.tail_bytes);
  out->data_bytes = load_relaxed(shared.data_bytes);
  out->payload_bytes = load_relaxed(shared.payload_bytes);
  uint64_t description = sizeof(ExtentHeader) + uint64_t{out->key_bytes} + out->head_bytes;
  if (description > tail_offset || out->tail_bytes > tail_capacity || uint64_t{tail_offset} + tail_capacity > bytes ||
      data_offset > bytes || out->data_bytes > bytes - data_offset || out->payload_bytes > region_bytes)
    return false;
  out->key = base + sizeof(ExtentHeader);
  out->head = out->key + out->key_bytes;
  out->tail = base + tail_offset;
  out->data = base + data_offset;
  return true;
}

}  // namespace

Reader::Reader(const std::string& path) : path_(path), files_(open_files(path)) { files_.locks->attach(); }

Reader::~Reader() { files_.locks->detach(); }

hsx_code Reader::lease_wait(const char* key, uint32_t key_bytes, int flags, uint64_t timeout_us, hsx_lease* out) {
  if (key == nullptr || key_bytes == 0 || key_bytes > UINT16_MAX)
    fail(HSX_E_INVALID, "lease: a key of %u bytes is not in 1..65535", key_bytes);
  const Wanted wanted = {key, key_bytes, key_hash(key, key_bytes), (flags & HSX_LEASE_ACK) != 0,
                         (flags & HSX_LEASE_EARLY) != 0};
  const ArenaHeader& header = files_.view.header();
  uint64_t deadline = 0;
  for (;;) {
    uint32_t seen = load_acquire(header.publish_count);  // before the look: what is published after it ends the wait
    bool closed = load_acquire(header.closed) != 0;
    bool failed = false;
    Found found = look(wanted, out, &failed);
    if (found == Found::kLeased) return failed ? HSX_E_FAILED : HSX_OK;
    if (found == Found::kGone)
      fail(HSX_E_LOST, "lease: sample '%.*s' is gone, its fate is %u", static_cast<int>(std::min(key_bytes, 200u)), key,
           out->fate);
    if (deadline == 0) deadline = deadline_us(timeout_us);
    if (closed || now_us() >= deadline)
      fail(HSX_E_TIMEOUT, "lease: sample '%.*s' is not there%s", static_cast<int>(std::min(key_bytes, 200u)), key,
           closed ? ", and its producer has closed the arena" : "");
    futex_wait(&header.publish_count, seen, deadline);
  }
}

Reader::Found Reader::look(const Wanted& wanted, hsx_lease* out, bool* failed) {
  *out = {};
  const Geometry& geometry = files_.view.geometry();
  std::vector<uint32_t> slots;
  if (!directory_lookup(files_.view.directory(), geometry.num_entries, &files_.view.header().directory_version,
                        wanted.hash, &slots)) {
    slots.resize(geometry.num_slots);  // the slot table says the same, slower
    for (uint32_t i = 0; i < geometry.num_slots; ++i) slots[i] = i;
  }
  Found best = Found::kNothing;
  for (uint32_t slot : slots) {
    Found found = slot < geometry.num_slots ? look_at(slot, wanted, out, failed) : Found::kNothing;
    if (found == Found::kLeased) return found;
    // A sample that is coming is news, one of the same key that went is not.
    if (best == Found::kNothing || found == Found::kPending) best = found;
  }
  return best;
}

Reader::Found Reader::look_at(uint32_t index, const Wanted& wanted, hsx_lease* out, bool* failed) {
  const SlotHeader& slot = files_.view.slot(index);
  for (int i = 0; i < 16; ++i) {  // a slot that changes under each look is not ours to have
    uint32_t state = load_acquire(slot.state);
    uint64_t generation = load_relaxed(slot.generation);
    if (state == kFree || load_relaxed(slot.magic) != kSlotMagic || load_relaxed(slot.key_hash) != wanted.hash)
      return Found::kNothing;
    if ((state == kOpen || state == kSealed) && !wanted.early) return Found::kPending;
    if (state == kRetired) {
      uint32_t fate = load_relaxed(slot.fate);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (load_relaxed(slot.state) != kRetired || load_relaxed(slot.generation) != generation) continue;
      out->fate = fate;
      out->slot = index;
      out->generation = generation;
      return Found::kGone;
    }
    if (state == kFree || state > kFailed)
      fail(HSX_E_INVALID, "%s: slot %u is in state %u", path_.c_str(), index, state);
    files_.locks->lease(index);
    Found found;
    try {
      found = look_leased(index, wanted, out, failed);
    } catch (...) {
      files_.locks->release(index);
      throw;
    }
    if (found == Found::kLeased) return found;
    files_.locks->release(index);
    if (found != Found::kPending) return found;
  }
  return Found::kPending;
}

// With the slot locked: from here on its state and memory stay if the state is `ready` or `failed`. kPending: look again.
Reader::Found Reader::look_leased(uint32_t index, const Wanted& wanted, hsx_lease* out, bool* failed) {
  uint32_t state = load_acquire(files_.view.slot(index).state);
  bool unfinished = state == kOpen || state == kSealed;
  if (state != kReady && state != kFailed && !(unfinished && wanted.early)) return Found::kPending;
  Description found;
  if (!describe(files_.view, index, &found))
    fail(HSX_E_INVALID, "%s: slot %u lies outside of the region", path_.c_str(), index);
  if (found.key_bytes != wanted.key_bytes || std::memcmp(found.key, wanted.key, wanted.key_bytes) != 0)
    return Found::kNothing;
  out->slot = index;
  out->generation = found.generation;
  if (state == kReady && !acknowledge(index, wanted.ack, found.generation, found.consumers)) {
    out->fate = kConsumed;
    return Found::kGone;
  }
  keep(index, found.generation);
  *failed = state == kFailed;
  out->fate = kNeverSeen;  // another sample of this key may have been looked at before
  out->head = found.head;
  out->tail = found.tail;
  out->data = found.data;
  out->data_bytes = found.data_bytes;
  out->sequence = found.sequence;
  out->head_bytes = found.head_bytes;
  out->tail_bytes = found.tail_bytes;
  out->consumers = found.consumers;
  out->state = state;
  return Found::kLeased;
}

// False if all acknowledgements are used up.
bool Reader::acknowledge(uint32_t index, bool ack, uint64_t generation, uint32_t consumers) {
  uint64_t& word = files_.view.ack(index);
  uint64_t seen = load_acquire(word);
  for (;;) {
    if (seen >> 32 != (generation & 0xFFFFFFFF))
      return true;  // somebody scribbled on it; the producer will not count it either
    if ((seen & 0xFFFFFFFF) >= consumers) return false;
    if (!ack || __atomic_compare_exchange_n(&word, &seen, seen + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE))
      return true;
  }
}

void Reader::keep(uint32_t slot, uint64_t generation) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (stopped_) fail(HSX_E_INVALID, "lease: the reader of %s is closed", path_.c_str());
  Held& held = held_[slot];
  held.generation = generation;
  ++held.count;
}

void Reader::acknowledge(uint32_t slot, uint64_t generation) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto held = held_.find(slot);
    if (held == held_.end() || held->second.generation != generation)
      fail(HSX_E_INVALID, "acknowledge: no lease on generation %llu of slot %u", ull(generation), slot);
  }
  if (!acknowledge(slot, true, generation, load_relaxed(files_.view.slot(slot).consumers)))
    fail(HSX_E_LOST, "acknowledge: the sample is gone: consumed");
}

void Reader::release(uint32_t slot, uint64_t generation) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto held = held_.find(slot);
    if (held == held_.end() || held->second.generation != generation)
      fail(HSX_E_INVALID, "release: no lease on generation %llu of slot %u", ull(generation), slot);
    if (--held->second.count == 0) held_.erase(held);
  }
  files_.locks->release(slot);
  uint32_t* count = &files_.view.ack_header().release_count;
  __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(count);
}

uint32_t Reader::state(uint32_t slot) const {
  return slot < files_.view.geometry().num_slots ? load_acquire(files_.view.slot(slot).state) : uint32_t{kFree};
}

PinnedRegion& Reader::pinned(CudaDevice& device) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (pinned_ == nullptr)
    pinned_ = std::make_unique<PinnedRegion>(device, files_.view.region(), files_.view.geometry().region_bytes);
  return *pinned_;
}

void Reader::alive(int* alive, int* closed) {
  *alive = files_.locks->producer_alive();  // first: a producer sets `closed` before its lock goes
  *closed = load_acquire(files_.view.header().closed) != 0;
}

void Reader::stop() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!held_.empty()) fail(HSX_E_BUSY, "close: %zu slots of %s are still leased", held_.size(), path_.c_str());
  stopped_ = true;
}

hsx_probe_info probe_arena(const std::string& path) {
  ProbedFiles files = probe_files(path);
  const Geometry& geometry = files.view.geometry();
  hsx_probe_info info = {};
  info.capacity_bytes = geometry.capacity_bytes;
  info.file_bytes = geometry.file_bytes;
  info.created_us = geometry.created_us;
  info.unread_ttl_us = geometry.unread_ttl_us;
  info.alive = files.alive;
  info.closed = load_acquire(files.view.header().closed) != 0;
  info.readers_attached = files.readers_attached;
  for (uint32_t i = 0; i < geometry.num_slots; ++i) {
    uint32_t state = load_acquire(files.view.slot(i).state);
    if (state == kFree || state == kRetired) continue;
    info.num_open += state == kOpen || state == kSealed;
    info.num_failed += state == kFailed;
    Description slot;
    if (state == kFailed || !describe(files.view, i, &slot))
      continue;  // without a lease it may change under us: a guess
    info.payload_bytes += slot.payload_bytes;
    if (state != kReady) continue;
    ++info.num_ready;
    uint64_t word = load_acquire(files.view.ack(i));
    info.num_unread += word >> 32 != (slot.generation & 0xFFFFFFFF) || (word & 0xFFFFFFFF) < slot.consumers;
  }
  return info;
}

}  // namespace hsx
