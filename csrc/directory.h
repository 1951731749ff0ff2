// Key hash -> slot: open addressing in the shared file, written by the producer under a version, read by anybody.
#ifndef HSXFER_DIRECTORY_H
#define HSXFER_DIRECTORY_H

#include <cstdint>
#include <vector>

#include "layout.h"

namespace hsx {

class DirectoryWriter {
 public:
  DirectoryWriter(DirectoryEntry* entries, uint32_t num_entries, uint32_t* version)
      : entries_(entries), mask_(num_entries - 1), version_(version) {}

  // All changes of one `Change` appear together, or a reader looks again.
  class Change {
   public:
    explicit Change(DirectoryWriter& directory);
    ~Change();
    Change(const Change&) = delete;
    void insert(uint64_t hash, uint32_t slot);
    void erase(uint64_t hash, uint32_t slot);  // which must be there

   private:
    DirectoryWriter& directory_;
  };

  std::vector<uint32_t> find(uint64_t hash) const;  // the producer's own look

 private:
  void put(uint32_t at, uint64_t hash, uint32_t slot_plus_1);

  DirectoryEntry* entries_;
  uint32_t mask_;
  uint32_t* version_;
};

// Slots whose key has this hash. False: the directory kept changing, or its producer died while it changed it.
bool directory_lookup(const DirectoryEntry* entries, uint32_t num_entries, const uint32_t* version, uint64_t hash,
                      std::vector<uint32_t>* slots);

}  // namespace hsx

#endif
