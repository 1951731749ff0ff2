// The two files of an arena: made by a producer, opened by a reader that believes nothing they say.
#ifndef HSXFER_ARENA_FILE_H
#define HSXFER_ARENA_FILE_H

#include <memory>
#include <string>

#include "hsxfer.h"
#include "layout.h"
#include "locks.h"
#include "memory_file.h"

namespace hsx {

// Where things lie in the file; copied out of the header and checked, so that later changes to the header do not matter.
struct Geometry {
  uint64_t file_bytes, capacity_bytes, slots_offset, directory_offset, region_offset, region_bytes, created_us,
      unread_ttl_us;
  uint32_t num_slots, num_entries;
};

// HSX_E_INVALID, naming the field, unless everything lies inside of `file_bytes`.
Geometry check_header(const ArenaHeader& header, uint64_t file_bytes, const std::string& path);

// The mapped parts, shared by producer (all writable) and readers (acknowledgements only).
class ArenaView {
 public:
  ArenaView() = default;
  ArenaView(Mapping arena, Mapping acks, const Geometry& geometry)
      : arena_(std::move(arena)), acks_(std::move(acks)), geometry_(geometry) {}
  const Geometry& geometry() const { return geometry_; }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(arena_.base()); }
  SlotHeader& slot(uint32_t index) const {
    return reinterpret_cast<SlotHeader*>(arena_.base() + geometry_.slots_offset)[index];
  }
  DirectoryEntry* directory() const {
    return reinterpret_cast<DirectoryEntry*>(arena_.base() + geometry_.directory_offset);
  }
  uint8_t* region() const { return arena_.base() + geometry_.region_offset; }
  AckHeader& ack_header() const { return *reinterpret_cast<AckHeader*>(acks_.base()); }
  uint64_t& ack(uint32_t index) const { return reinterpret_cast<uint64_t*>(acks_.base() + kPageBytes)[index]; }
  const Mapping& arena() const { return arena_; }

 private:
  Mapping arena_, acks_;
  Geometry geometry_ = {};
};

struct ProducerFiles {
  ArenaView view;
  std::shared_ptr<AckFile> locks;
  UniqueFd arena_fd;
};
ProducerFiles create_files(const hsx_arena_options& options);

struct ReaderFiles {
  ArenaView view;
  std::shared_ptr<AckFile> locks;
};
ReaderFiles open_files(const std::string& path);

// From outside, without attaching to it or disturbing what this process holds of it.
struct ProbedFiles {
  ArenaView view;
  bool alive, readers_attached;
};
ProbedFiles probe_files(const std::string& path);

}  // namespace hsx

#endif
