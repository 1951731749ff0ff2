// The producing side of an arena: which slot has which piece of the region, and in which state it is. Moves no data itself.
#ifndef HSXFER_ARENA_H
#define HSXFER_ARENA_H

#include <mutex>
#include <string>
#include <vector>

#include "arena_file.h"
#include "directory.h"
#include "driver.h"
#include "extents.h"
#include "hsxfer.h"
#include "slot_lists.h"

namespace hsx {

// Copies that were checked, and what they are good for.
struct CopyPlan {
  std::vector<CopyOp> ops;
  std::vector<hsx_slot> slots;
  uint64_t num_rows = 0, num_bytes = 0;
};

class Arena {
 public:
  explicit Arena(const hsx_arena_options& options);
  ~Arena();
  Arena(const Arena&) = delete;

  hsx_slot begin(const hsx_sample_spec& spec);
  void wait_space(uint64_t timeout_us);
  void* data(hsx_slot slot, uint64_t* data_bytes);
  void stats(hsx_stats* out);
  void sweep();
  bool has_live_slots();

  // All copies or none: HSX_E_INVALID for one that does not fit into its slot, or whose slot takes none any more.
  CopyPlan plan_copies(const hsx_copy* copies, size_t num_copies);
  // The slot takes no more copies; its tail is written.
  void start_seal(hsx_slot slot, const void* tail, uint32_t tail_bytes, bool failed);
  // No more begins. Slots still open fail when their seal comes, which is the caller's to queue.
  std::vector<hsx_slot> stop_taking();

  // From the completion thread, in the order of submission.
  void finish_copies(const std::vector<hsx_slot>& slots, uint64_t num_copies, uint64_t num_rows, uint64_t num_bytes,
                     const std::string& error);
  void finish_seal(hsx_slot slot, bool failed);

  void announce_rows();  // some have landed in a sample that is not ready

  // After stop_taking(), with nothing queued. The files stay if unread samples are in them.
  void close();

  void* region() const { return files_.view.region(); }
  uint64_t region_bytes() const { return files_.view.geometry().region_bytes; }

 private:
  SlotInfo& live(hsx_slot slot, const char* call);
  void check_key_unused(const hsx_sample_spec& spec, uint64_t hash);
  void plan_copy(const hsx_copy& copy, size_t number, CopyPlan* plan);
  uint32_t take_slot();
  uint64_t take_extent(uint64_t bytes);
  bool has_key(const SlotInfo& slot, const hsx_sample_spec& spec) const;
  bool recycle_oldest_failed();
  void recycle(uint32_t index);
  bool failed_make_room(uint64_t bytes);
  void describe(uint32_t index, const hsx_sample_spec& spec, uint64_t hash);
  void set_state(uint32_t index, State state, bool wake);
  void retire(uint32_t index, Fate fate);
  void drain(uint32_t index);
  void drop_data(uint32_t index);
  void write_tail(uint32_t index, const void* tail, uint32_t tail_bytes);
  void sweep_locked();
  bool acknowledged(uint32_t index);
  void announce_space();
  ExtentHeader& extent(const SlotInfo& slot) const {
    return *reinterpret_cast<ExtentHeader*>(files_.view.region() + slot.extent_offset);
  }

  ProducerFiles files_;
  std::string path_;
  std::mutex mutex_;
  SlotLists slots_;
  Extents extents_;
  DirectoryWriter directory_;
  hsx_stats counts_ = {};  // the running counts of it
  uint64_t payload_bytes_ = 0;
  uint64_t sequence_ = 0;
  uint64_t num_frees_ = 0, num_frees_when_full_ = 0;
  bool stopping_ = false, closed_ = false;
};

}  // namespace hsx

#endif
