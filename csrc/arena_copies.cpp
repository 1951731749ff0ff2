// Copies into the slots of an arena: checked before anything is queued, accounted for when they are done.
#include <algorithm>

#include "arena.h"
#include "error.h"

namespace hsx {

CopyPlan Arena::plan_copies(const hsx_copy* copies, size_t num_copies) {
  CopyPlan plan;
  plan.ops.reserve(num_copies);
  std::lock_guard<std::mutex> guard(mutex_);
  for (size_t i = 0; i < num_copies; ++i) plan_copy(copies[i], i, &plan);
  return plan;
}

void Arena::plan_copy(const hsx_copy& copy, size_t number, CopyPlan* plan) {
  const SlotInfo& slot = live(copy.slot, "copy");
  if (slot.phase != kWriting) fail(HSX_E_INVALID, "copy %zu: slot %u is sealed", number, copy.slot.index);
  if (copy.num_rows == 0) return;
  // [offset, offset + (rows - 1) * stride + width) inside of the data, without overflow.
  auto inside = [&](uint64_t offset, uint64_t stride, uint64_t width) {
    uint64_t end;
    return !__builtin_mul_overflow(copy.num_rows - 1, stride, &end) && !__builtin_add_overflow(end, width, &end) &&
           !__builtin_add_overflow(end, offset, &end) && end <= slot.data_bytes;
  };
  if (!inside(copy.dst_offset, copy.dst_stride_bytes, copy.row_bytes))
    fail(HSX_E_INVALID, "copy %zu: %llu rows of %llu bytes at %llu leave the slot's %llu bytes of data", number,
         ull(copy.num_rows), ull(copy.row_bytes), ull(copy.dst_offset), ull(slot.data_bytes));
  if (copy.src == nullptr && copy.row_bytes > 0) fail(HSX_E_INVALID, "copy %zu: rows at no address", number);
  bool digests = copy.digest_offset != HSX_NO_DIGEST;
  if (digests && (copy.digest_offset % 8 != 0 || copy.digest_stride_bytes % 8 != 0 ||
                  !inside(copy.digest_offset, copy.digest_stride_bytes, 8)))
    fail(HSX_E_INVALID,
         "copy %zu: digests at %llu, %llu bytes apart, are not aligned or leave the slot's %llu bytes of data", number,
         ull(copy.digest_offset), ull(copy.digest_stride_bytes), ull(slot.data_bytes));
  uint8_t* data = files_.view.region() + slot.extent_offset + slot.data_offset;
  auto* table = digests ? reinterpret_cast<uint64_t*>(data + copy.digest_offset) : nullptr;
  uint64_t* marks = nullptr;
  if (copy.rows_per_mark != 0) {
    uint64_t end;
    if (__builtin_add_overflow(copy.first_row, copy.num_rows - 1, &end) || copy.mark_offset < slot.marks_offset ||
        copy.mark_offset % 8 != 0 ||
        end / copy.rows_per_mark >=
            slot.num_marks - std::min((copy.mark_offset - slot.marks_offset) / 8, slot.num_marks))
      fail(HSX_E_INVALID, "copy %zu: watermarks of rows %llu on, %llu a word, at %llu leave the slot's %llu", number,
           ull(copy.first_row), ull(copy.rows_per_mark), ull(copy.mark_offset), ull(slot.num_marks));
    marks = reinterpret_cast<uint64_t*>(data + copy.mark_offset);
  }
  plan->ops.push_back({data + copy.dst_offset, copy.src, copy.dst_stride_bytes, copy.src_stride_bytes, copy.row_bytes,
                       copy.num_rows, table, copy.digest_stride_bytes, marks, copy.rows_per_mark, copy.first_row});
  if (plan->slots.empty() || plan->slots.back().index != copy.slot.index) plan->slots.push_back(copy.slot);
  plan->num_rows += copy.num_rows;
  plan->num_bytes += copy.num_rows * copy.row_bytes;
}

void Arena::finish_copies(const std::vector<hsx_slot>& slots, uint64_t num_copies, uint64_t num_rows,
                          uint64_t num_bytes, const std::string& error) {
  std::lock_guard<std::mutex> guard(mutex_);
  ++counts_.num_submissions;
  if (error.empty()) {
    counts_.num_copies += num_copies;
    counts_.num_rows += num_rows;
    counts_.copied_bytes += num_bytes;
    return;
  }
  for (const hsx_slot& slot : slots)
    if (slots_[slot.index].error.empty())
      slots_[slot.index].error = error;  // the slot cannot be another's before its seal
}

}  // namespace hsx
