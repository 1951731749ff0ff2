// How samples end: sealed, acknowledged, expired, failed; and how their memory comes back.
#include <algorithm>
#include <atomic>
#include <cstdio>

#include "arena.h"
#include "error.h"
#include "futex.h"

namespace hsx {
namespace {

// The smallest tail that says why. `capacity` may be too small for that; then as much as fits and is still JSON.
std::string failed_tail(const std::string& reason, uint32_t capacity) {
  std::string text = "{\"failed\":\"";
  for (char c : reason) {
    std::string more(1, c);
    if (c == '"' || c == '\\') more = std::string("\\") + c;
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7E) more = "?";
    if (text.size() + more.size() + 2 > capacity) break;
    text += more;
  }
  text += "\"}";
  if (text.size() <= capacity) return text;
  return capacity >= 2 ? "{}" : "";
}

}  // namespace

void Arena::start_seal(hsx_slot slot, const void* tail, uint32_t tail_bytes, bool failed) {
  std::lock_guard<std::mutex> guard(mutex_);
  SlotInfo& info = live(slot, "seal");
  if (info.phase != kWriting)
    fail(HSX_E_INVALID, "seal: slot %u generation %llu is sealed already", slot.index, ull(slot.generation));
  if (tail_bytes > info.tail_capacity_bytes || (tail == nullptr && tail_bytes > 0))
    fail(HSX_E_INVALID, "seal: a tail of %u bytes, the slot has room for %u", tail_bytes, info.tail_capacity_bytes);
  write_tail(slot.index, tail, tail_bytes);
  slots_.move(slot.index, kSealing);
  if (!failed) set_state(slot.index, kSealed, false);
}

void Arena::write_tail(uint32_t index, const void* tail, uint32_t tail_bytes) {
  const SlotInfo& info = slots_[index];
  if (tail_bytes > 0) std::memcpy(reinterpret_cast<uint8_t*>(&extent(info)) + info.tail_offset, tail, tail_bytes);
  store_relaxed(files_.view.slot(index).tail_bytes, tail_bytes);
}

void Arena::finish_seal(hsx_slot slot, bool failed) {
  std::lock_guard<std::mutex> guard(mutex_);
  uint32_t index = slot.index;
  SlotInfo& info = slots_[index];
  if (!failed && !info.error.empty()) {
    std::string tail = failed_tail(info.error, info.tail_capacity_bytes);
    write_tail(index, tail.data(), static_cast<uint32_t>(tail.size()));
    failed = true;
  }
  ++(failed ? counts_.num_failed : counts_.num_ready);
  info.settled_us = now_us();
  store_relaxed(files_.view.slot(index).sequence, ++sequence_);
  if (failed) drop_data(index);
  store_release(files_.view.header().newest_sequence, sequence_);
  slots_.move(index, failed ? kBroken : kUnread);
  set_state(index, failed ? kFailed : kReady, true);
  if (failed) announce_space();
}

// What a failed sample keeps is its description.
void Arena::drop_data(uint32_t index) {
  SlotInfo& info = slots_[index];
  // In this order: who has an early lease and sees the shorter extent sees no data in it.
  store_relaxed(extent(info).data_bytes, 0u);
  store_release(files_.view.slot(index).extent_bytes, info.data_offset);
  extents_.release(info.extent_offset + info.data_offset, info.extent_bytes - info.data_offset);
  info.extent_bytes = info.data_offset;
  info.data_bytes = 0;
  payload_bytes_ -= info.payload_bytes;
  info.payload_bytes = 0;
  ++num_frees_;
}

bool Arena::acknowledged(uint32_t index) {
  uint64_t word = load_acquire(files_.view.ack(index));
  const SlotInfo& info = slots_[index];
  return word >> 32 == (info.generation & 0xFFFFFFFF) && (word & 0xFFFFFFFF) >= info.consumers;
}

// The state first, the look at the locks in drain() second: a reader locks first and looks at the state second.
void Arena::retire(uint32_t index, Fate fate) {
  store_relaxed(files_.view.slot(index).fate, fate);
  slots_.move(index, kDraining);
  set_state(index, kRetired, false);
}

void Arena::drain(uint32_t index) {
  if (files_.locks->leased(index)) return;
  SlotInfo& info = slots_[index];
  extents_.release(info.extent_offset, info.extent_bytes);
  info.extent_bytes = 0;
  payload_bytes_ -= info.payload_bytes;
  info.payload_bytes = 0;
  slots_.move(index, kGone);
  ++num_frees_;
}

void Arena::announce_space() {
  uint32_t* count = &files_.view.ack_header().release_count;
  __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(count);
}

void Arena::announce_rows() {
  uint32_t* count = &files_.view.header().publish_count;
  __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(count);
}

void Arena::sweep() {
  std::lock_guard<std::mutex> guard(mutex_);
  sweep_locked();
}

void Arena::sweep_locked() {
  uint64_t num_frees = num_frees_, now = now_us(), ttl = files_.view.geometry().unread_ttl_us;
  auto too_old = [&](uint32_t index) { return now - slots_[index].settled_us >= ttl; };
  slots_.each(kUnread, [&](uint32_t index) {
    if (acknowledged(index)) {
      ++counts_.num_consumed;
      retire(index, kConsumed);
    } else if (too_old(index) && !files_.locks->leased(index)) {
      ++counts_.num_expired;
      retire(index, kExpired);
    }
  });
  slots_.each(kBroken, [&](uint32_t index) {
    if (!too_old(index)) return;
    ++counts_.num_expired;
    retire(index, kExpired);
  });
  slots_.each(kDraining, [&](uint32_t index) { drain(index); });
  if (num_frees_ != num_frees) announce_space();
}

bool Arena::has_live_slots() {
  std::lock_guard<std::mutex> guard(mutex_);
  return slots_.count(kUnused) + slots_.count(kGone) < slots_.size();
}

void Arena::wait_space(uint64_t timeout_us) {
  constexpr uint64_t kLookUs = 100000;  // a reader that died releases without waking anybody
  uint64_t deadline = deadline_us(timeout_us);
  uint32_t* count = &files_.view.ack_header().release_count;
  // This waiter's own: another that wakes first must not take the release from it.
  uint64_t num_frees_when_full = [&] {
    std::lock_guard<std::mutex> guard(mutex_);
    return num_frees_when_full_;
  }();
  for (;;) {
    uint32_t seen = load_acquire(*count);
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (stopping_) fail(HSX_E_INVALID, "wait_space: the arena is closed");
      sweep_locked();
      if (num_frees_ != num_frees_when_full) {
        num_frees_when_full_ = num_frees_;
        return;
      }
    }
    uint64_t now = now_us();
    if (now >= deadline) fail(HSX_E_TIMEOUT, "wait_space: nothing was released in %llu us", ull(timeout_us));
    futex_wait(count, seen, std::min(deadline, now + kLookUs));
  }
}

void Arena::stats(hsx_stats* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  sweep_locked();
  *out = counts_;
  const Geometry& geometry = files_.view.geometry();
  out->capacity_bytes = geometry.capacity_bytes;
  out->payload_bytes = payload_bytes_;
  out->region_bytes = geometry.region_bytes;
  out->extent_bytes = extents_.used_bytes();
  out->num_slots = slots_.size();
  out->num_live = slots_.size() - slots_.count(kUnused) - slots_.count(kGone);
  out->num_unread = slots_.count(kUnread);
  out->readers_attached = files_.locks->readers_attached();
}

std::vector<hsx_slot> Arena::stop_taking() {
  std::lock_guard<std::mutex> guard(mutex_);
  stopping_ = true;
  announce_space();  // to wait_space
  std::vector<hsx_slot> open;
  slots_.each(kWriting, [&](uint32_t index) {
    slots_[index].error = "its producer closed the arena before it was sealed";
    slots_.move(index, kSealing);
    open.push_back({slots_[index].generation, index, 0});
  });
  return open;
}

void Arena::close() {
  std::lock_guard<std::mutex> guard(mutex_);
  sweep_locked();
  ArenaHeader& header = files_.view.header();
  store_release(header.closed, 1u);
  __atomic_add_fetch(&header.publish_count, 1, __ATOMIC_SEQ_CST);
  futex_wake_all(&header.publish_count);
  if (slots_.count(kUnread) == 0) {
    unlink_if_same(files_.arena_fd.get(), path_ + ".arena");
    unlink_if_same(files_.locks->fd(), path_ + ".ack");
  } else {
    for (auto [offset, bytes] : extents_.free_pieces()) {
      uint64_t start = align_up(offset, kPageBytes), end = (offset + bytes) / kPageBytes * kPageBytes;
      if (start < end) punch_hole(files_.arena_fd.get(), files_.view.geometry().region_offset + start, end - start);
    }
  }
  closed_ = true;
  files_.locks->unlock_producer();  // last: who sees the lock gone sees `closed`
}

}  // namespace hsx
