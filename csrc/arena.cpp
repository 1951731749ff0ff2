#include "arena.h"

#include <algorithm>
#include <atomic>

#include "error.h"
#include "futex.h"

namespace hsx {

Arena::Arena(const hsx_arena_options& options)
    : files_(create_files(options)),
      path_(options.path),
      slots_(files_.view.geometry().num_slots),
      extents_(files_.view.geometry().region_bytes),
      directory_(files_.view.directory(), files_.view.geometry().num_entries, &files_.view.header().directory_version) {
}

Arena::~Arena() {
  if (closed_) return;
  unlink_if_same(files_.arena_fd.get(), path_ + ".arena");
  unlink_if_same(files_.locks->fd(), path_ + ".ack");
}

hsx_slot Arena::begin(const hsx_sample_spec& spec) {
  if (spec.key == nullptr || spec.key_bytes == 0 || spec.key_bytes > UINT16_MAX)
    fail(HSX_E_INVALID, "begin: a key of %u bytes is not in 1..65535", spec.key_bytes);
  if (spec.consumers == 0 || spec.consumers > UINT16_MAX)
    fail(HSX_E_INVALID, "begin: %u consumers are not in 1..65535", spec.consumers);
  if (spec.head == nullptr && spec.head_bytes > 0)
    fail(HSX_E_INVALID, "begin: a head of %u bytes at no address", spec.head_bytes);
  if (spec.payload_bytes > spec.data_bytes)
    fail(HSX_E_INVALID, "begin: a payload of %llu bytes is more than the data's %llu", ull(spec.payload_bytes),
         ull(spec.data_bytes));
  if (spec.marks_offset % 8 != 0 || spec.marks_offset > spec.data_bytes ||
      spec.num_marks > (spec.data_bytes - spec.marks_offset) / 8)
    fail(HSX_E_INVALID, "begin: %llu watermarks at %llu leave the data's %llu bytes", ull(spec.num_marks),
         ull(spec.marks_offset), ull(spec.data_bytes));
  constexpr uint32_t kMaxDescription = 1u << 30;
  if (spec.head_bytes > kMaxDescription || spec.tail_capacity_bytes > kMaxDescription)
    fail(HSX_E_INVALID, "begin: a head of %u bytes or a tail of %u is more than 2^30", spec.head_bytes,
         spec.tail_capacity_bytes);

  uint64_t hash = key_hash(spec.key, spec.key_bytes);
  std::lock_guard<std::mutex> guard(mutex_);
  if (stopping_) fail(HSX_E_INVALID, "begin: the arena is closed");
  check_key_unused(spec, hash);
  uint64_t capacity = files_.view.geometry().capacity_bytes;
  auto over = [&] { return spec.payload_bytes > capacity || payload_bytes_ > capacity - spec.payload_bytes; };
  if (over()) sweep_locked();
  if (over()) {
    num_frees_when_full_ = num_frees_;
    fail(HSX_E_FULL, "begin: %llu bytes of payload do not fit: %llu of %llu are in use", ull(spec.payload_bytes),
         ull(payload_bytes_), ull(capacity));
  }
  if (spec.data_bytes > region_bytes())
    fail(HSX_E_FULL, "begin: %llu bytes of data for %llu of payload can never fit into a region of %llu",
         ull(spec.data_bytes), ull(spec.payload_bytes), ull(region_bytes()));

  SlotInfo plan;
  plan.tail_offset = static_cast<uint32_t>(align_up(sizeof(ExtentHeader) + spec.key_bytes + spec.head_bytes, 8));
  plan.data_offset = align_up(plan.tail_offset + uint64_t{spec.tail_capacity_bytes}, kAlignBytes);
  plan.extent_bytes = align_up(plan.data_offset + spec.data_bytes, kAlignBytes);
  plan.extent_offset = take_extent(plan.extent_bytes);
  uint32_t index;
  try {
    index = take_slot();
  } catch (...) {
    extents_.release(plan.extent_offset, plan.extent_bytes);
    throw;
  }
  SlotInfo& slot = slots_[index];
  slot.extent_offset = plan.extent_offset;
  slot.extent_bytes = plan.extent_bytes;
  slot.tail_offset = plan.tail_offset;
  slot.data_offset = plan.data_offset;
  describe(index, spec, hash);
  payload_bytes_ += spec.payload_bytes;
  ++counts_.num_begun;
  return {slot.generation, index, 0};
}

bool Arena::has_key(const SlotInfo& slot, const hsx_sample_spec& spec) const {
  return slot.key_bytes == spec.key_bytes && std::memcmp(&extent(slot) + 1, spec.key, spec.key_bytes) == 0;
}

// A sample that failed may be tried again under its key.
void Arena::check_key_unused(const hsx_sample_spec& spec, uint64_t hash) {
  bool swept = false;
  for (uint32_t index : directory_.find(hash)) {
    const SlotInfo& slot = slots_[index];
    auto same = [&] {
      return slot.phase != kDraining && slot.phase != kGone && slot.phase != kBroken && has_key(slot, spec);
    };
    if (same() && !swept) {
      sweep_locked();  // it may have been acknowledged since
      swept = true;
    }
    if (same())
      fail(HSX_E_BUSY, "begin: key '%.*s' is in use by a live sample", static_cast<int>(spec.key_bytes), spec.key);
  }
}

uint64_t Arena::take_extent(uint64_t bytes) {
  uint64_t offset = extents_.allocate(bytes);
  if (offset == Extents::kNone) {
    sweep_locked();
    offset = extents_.allocate(bytes);
  }
  if (offset == Extents::kNone && failed_make_room(bytes))
    while (offset == Extents::kNone && recycle_oldest_failed()) offset = extents_.allocate(bytes);
  if (offset == Extents::kNone) {
    num_frees_when_full_ = num_frees_;
    fail(HSX_E_FULL,
         "begin: an extent of %llu bytes does not fit: %llu of %llu are in use, the largest free piece has %llu",
         ull(bytes), ull(extents_.used_bytes()), ull(region_bytes()), ull(extents_.largest_free_bytes()));
  }
  return offset;
}

uint32_t Arena::take_slot() {
  auto reusable = [&] { return slots_.count(kUnused) > 0 || slots_.count(kGone) > 0; };
  if (!reusable()) sweep_locked();
  while (!reusable() && recycle_oldest_failed()) {
  }
  if (!reusable()) {
    num_frees_when_full_ = num_frees_;
    fail(HSX_E_FULL, "begin: all %u slots hold live samples", slots_.size());
  }
  // Of the retired ones the longest-retired, so that late readers learn fates for as long as possible.
  return slots_.count(kUnused) > 0 ? slots_.first(kUnused) : slots_.first(kGone);
}

// Whether a piece of `bytes` would be free without the failed samples' descriptions: they are worth keeping if not.
bool Arena::failed_make_room(uint64_t bytes) {
  std::vector<std::pair<uint64_t, uint64_t>> pieces(extents_.free_pieces().begin(), extents_.free_pieces().end());
  slots_.each(kBroken,
              [&](uint32_t index) { pieces.emplace_back(slots_[index].extent_offset, slots_[index].extent_bytes); });
  std::sort(pieces.begin(), pieces.end());
  uint64_t start = 0, end = 0;
  for (auto [offset, piece_bytes] : pieces) {
    if (offset != end) start = offset;
    end = offset + piece_bytes;
    if (end - start >= bytes) return true;
  }
  return false;
}

bool Arena::recycle_oldest_failed() {
  uint32_t index = slots_.first(kBroken);
  if (index == kNoSlot) return false;
  recycle(index);
  return true;
}

void Arena::recycle(uint32_t index) {
  retire(index, kRecycled);
  drain(index);
  ++counts_.num_recycled;
}

// Everything of the slot but what the caller put into its SlotInfo. Readers may look at any moment; they believe nothing before `open`.
void Arena::describe(uint32_t index, const hsx_sample_spec& spec, uint64_t hash) {
  SlotInfo& slot = slots_[index];
  SlotHeader& header = files_.view.slot(index);
  bool was_listed = slot.listed;
  uint64_t old_hash = slot.key_hash;

  ++slot.generation;
  slot.key_hash = hash;
  slot.key_bytes = spec.key_bytes;
  slot.head_bytes = spec.head_bytes;
  slot.data_bytes = spec.data_bytes;
  slot.payload_bytes = spec.payload_bytes;
  slot.marks_offset = spec.marks_offset;
  slot.num_marks = spec.num_marks;
  slot.tail_capacity_bytes = spec.tail_capacity_bytes;
  slot.consumers = spec.consumers;
  slot.error.clear();
  slot.listed = true;

  store_release(header.state, kFree);
  std::atomic_thread_fence(std::memory_order_release);  // `free` before any field of the new sample
  __atomic_store_n(&files_.view.ack(index), ack_word(slot.generation, 0), __ATOMIC_RELEASE);
  store_relaxed(header.magic, kSlotMagic);
  store_relaxed(header.generation, slot.generation);
  store_relaxed(header.sequence, 0u);
  store_relaxed(header.extent_offset, slot.extent_offset);
  store_relaxed(header.extent_bytes, slot.extent_bytes);
  store_relaxed(header.key_hash, hash);
  store_relaxed(header.key_bytes, spec.key_bytes);
  store_relaxed(header.consumers, spec.consumers);
  store_relaxed(header.head_bytes, spec.head_bytes);
  store_relaxed(header.tail_bytes, 0u);
  store_relaxed(header.fate, kNeverSeen);

  ExtentHeader& at = extent(slot);
  at = {};
  at.tail_offset = slot.tail_offset;
  at.tail_capacity_bytes = slot.tail_capacity_bytes;
  at.data_offset = slot.data_offset;
  at.data_bytes = slot.data_bytes;
  at.payload_bytes = slot.payload_bytes;
  if (spec.num_marks > 0) {
    at.watermark_offset = slot.data_offset + spec.marks_offset;
    at.num_watermarks = static_cast<uint32_t>(spec.num_marks);
    std::memset(reinterpret_cast<uint8_t*>(&at) + at.watermark_offset, 0, 8 * spec.num_marks);
  }
  auto* description = reinterpret_cast<uint8_t*>(&at + 1);
  std::memcpy(description, spec.key, spec.key_bytes);
  if (spec.head_bytes > 0) std::memcpy(description + spec.key_bytes, spec.head, spec.head_bytes);
  for (uint32_t other : directory_.find(hash))
    if (slots_[other].phase == kBroken && has_key(slots_[other], spec)) recycle(other);
  {
    DirectoryWriter::Change change(directory_);
    if (was_listed) change.erase(old_hash, index);
    for (uint32_t other : directory_.find(hash))  // a new sample of the same key hides the fate of the old one
      if (slots_[other].phase == kDraining || slots_[other].phase == kGone) {
        change.erase(hash, other);
        slots_[other].listed = false;
      }
    change.insert(hash, index);
  }
  slots_.move(index, kWriting);
  set_state(index, kOpen, false);
}

void Arena::set_state(uint32_t index, State state, bool wake) {
  ArenaHeader& header = files_.view.header();
  store_release(files_.view.slot(index).state, state);
  __atomic_add_fetch(&header.publish_count, 1, __ATOMIC_SEQ_CST);
  if (wake) futex_wake_all(&header.publish_count);
}

SlotInfo& Arena::live(hsx_slot slot, const char* call) {
  if (slot.index >= slots_.size()) fail(HSX_E_INVALID, "%s: slot %u of %u", call, slot.index, slots_.size());
  SlotInfo& info = slots_[slot.index];
  if (info.generation != slot.generation || info.phase == kUnused || info.phase == kDraining || info.phase == kGone)
    fail(HSX_E_INVALID, "%s: generation %llu of slot %u is gone, it is at %llu", call, ull(slot.generation), slot.index,
         ull(info.generation));
  return info;
}

void* Arena::data(hsx_slot slot, uint64_t* data_bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const SlotInfo& info = live(slot, "data");
  *data_bytes = info.data_bytes;
  return files_.view.region() + info.extent_offset + info.data_offset;
}

}  // namespace hsx
