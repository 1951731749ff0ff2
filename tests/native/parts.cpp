// Inner parts of the core with a C face of their own, for tests that need to see inside.
#include <cstdint>
#include <cstring>
#include <vector>

#include "directory.h"
#include "extents.h"
#include "rows.h"

extern "C" {

void* extents_new(uint64_t bytes) { return new hsx::Extents(bytes); }
void extents_delete(void* extents) { delete static_cast<hsx::Extents*>(extents); }
uint64_t extents_allocate(void* extents, uint64_t bytes) { return static_cast<hsx::Extents*>(extents)->allocate(bytes); }
void extents_release(void* extents, uint64_t at, uint64_t bytes) { static_cast<hsx::Extents*>(extents)->release(at, bytes); }
uint64_t extents_used(void* extents) { return static_cast<hsx::Extents*>(extents)->used_bytes(); }
uint64_t extents_largest(void* extents) { return static_cast<hsx::Extents*>(extents)->largest_free_bytes(); }
uint64_t extents_free_pieces(void* extents, uint64_t* out) {  // offset, bytes, offset, bytes...
  uint64_t count = 0;
  for (auto [offset, bytes] : static_cast<hsx::Extents*>(extents)->free_pieces()) {
    out[count++] = offset;
    out[count++] = bytes;
  }
  return count / 2;
}

// Memory is the caller's: entries, then the version.
void directory_change(void* entries, uint32_t num_entries, uint32_t* version, const uint64_t* hashes, const uint32_t* slots,
                      const uint8_t* inserts, uint32_t count) {
  hsx::DirectoryWriter writer(static_cast<hsx::DirectoryEntry*>(entries), num_entries, version);
  hsx::DirectoryWriter::Change change(writer);
  for (uint32_t i = 0; i < count; ++i) inserts[i] ? change.insert(hashes[i], slots[i]) : change.erase(hashes[i], slots[i]);
}
int32_t directory_find(const void* entries, uint32_t num_entries, const uint32_t* version, uint64_t hash, uint32_t* out, int32_t room) {
  std::vector<uint32_t> slots;
  if (!hsx::directory_lookup(static_cast<const hsx::DirectoryEntry*>(entries), num_entries, version, hash, &slots)) return -1;
  for (int32_t i = 0; i < room && i < static_cast<int32_t>(slots.size()); ++i) out[i] = slots[i];
  return static_cast<int32_t>(slots.size());
}

// Slots 0 to 15 are there all the time, hash 5 + slot % 3: the writer erases and inserts them in one change, and others around them...
void directory_write(void* entries, uint32_t num_entries, uint32_t* version, uint64_t num_changes) {
  hsx::DirectoryWriter writer(static_cast<hsx::DirectoryEntry*>(entries), num_entries, version);
  uint64_t random = 1, hashes[16] = {};
  for (uint64_t i = 0; i < num_changes; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    uint32_t number = random >> 60, slot = 16 + number;
    hsx::DirectoryWriter::Change change(writer);
    if (i % 2) {
      change.erase(5 + number % 3, number);
      change.insert(5 + number % 3, number);
    } else if (hashes[number] != 0) {
      change.erase(hashes[number], slot);
      hashes[number] = 0;
    } else {
      hashes[number] = 4 + (random >> 40) % 6 + num_entries * ((random >> 50) % 2 + 1);
      change.insert(hashes[number], slot);
    }
  }
}
// ...and the reader, until *stop, must find exactly them. Returns looks, or -1 for a wrong one; *unstable counts those that gave up.
int64_t directory_watch(const void* entries, uint32_t num_entries, const uint32_t* version, const uint32_t* stop, uint64_t* unstable) {
  std::vector<uint32_t> slots;
  int64_t looks = 0;
  for (; __atomic_load_n(stop, __ATOMIC_ACQUIRE) == 0; ++looks) {
    uint32_t kind = looks % 3, expected = kind == 0 ? 6 : 5;
    if (!hsx::directory_lookup(static_cast<const hsx::DirectoryEntry*>(entries), num_entries, version, 5 + kind, &slots)) {
      ++*unstable;
      continue;
    }
    uint32_t seen = 0;
    for (uint32_t slot : slots) seen |= slot < 16 && slot % 3 == kind ? 1u << slot : 1u << 31;
    if (slots.size() != expected || static_cast<uint32_t>(__builtin_popcount(seen)) != expected || seen >> 31) return -1;
  }
  return looks;
}

int has_kernels(const char* name) { return hsx::find_kernels(name) != nullptr; }
uint64_t digest_row(const char* name, uint8_t* dst, const uint8_t* src, uint64_t bytes, int stream) {
  return hsx::find_kernels(name)->digest(dst, src, bytes, stream != 0);
}
}
