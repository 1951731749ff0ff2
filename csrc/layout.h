// docs/format.md sections 2 and 3 as structs. Whatever changes here changes the wire format.
#ifndef HSXFER_LAYOUT_H
#define HSXFER_LAYOUT_H

#include <cstddef>
#include <cstdint>

namespace hsx {

constexpr char kArenaMagic[8] = {'H', 'S', 'X', 'A', 'R', 'E', 'N', 'A'};
constexpr char kAckMagic[8] = {'H', 'S', 'X', 'A', 'C', 'K', '0', '0'};
constexpr uint32_t kSlotMagic = 0x31585348;  // 'HSX1'
constexpr uint32_t kFormatVersion = 0;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kAlignBytes = 256;  // of extents, and of the data in them

enum State : uint32_t { kFree = 0, kOpen = 1, kSealed = 2, kReady = 3, kFailed = 4, kRetired = 5 };
enum Fate : uint16_t { kNeverSeen = 0, kConsumed = 1, kExpired = 2, kClosed = 3, kRecycled = 4 };

struct ArenaHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t file_bytes;
  uint64_t capacity_bytes;
  uint64_t slots_offset;
  uint32_t num_slots;
  uint32_t slot_bytes;
  uint64_t directory_offset;
  uint32_t num_entries;
  uint32_t entry_bytes;
  uint64_t region_offset;
  uint64_t region_bytes;
  uint64_t created_us;
  uint64_t unread_ttl_us;
  uint8_t reserved0[32];
  // From here on it changes while the arena lives; each group has cache lines of its own.
  uint32_t publish_count;  // shared futex
  uint32_t closed;
  uint64_t newest_sequence;
  uint8_t reserved1[48];
  uint32_t directory_version;  // odd while the directory changes
  uint8_t reserved2[60];
};
static_assert(sizeof(ArenaHeader) == 256, "wire format: the rest of the page is reserved");
static_assert(offsetof(ArenaHeader, region_offset) == 64, "wire format");
static_assert(offsetof(ArenaHeader, created_us) == 80, "wire format");
static_assert(offsetof(ArenaHeader, publish_count) == 128, "wire format");
static_assert(offsetof(ArenaHeader, directory_version) == 192, "wire format");

struct SlotHeader {
  uint32_t magic;  // 0 until the slot is used the first time
  uint32_t state;  // release-stored last; readers look at any moment
  uint64_t generation;
  uint64_t sequence;
  uint64_t extent_offset;
  uint64_t extent_bytes;
  uint64_t key_hash;
  uint16_t key_bytes;
  uint16_t consumers;
  uint32_t head_bytes;
  uint32_t tail_bytes;
  uint16_t fate;
  uint16_t reserved;
};
static_assert(sizeof(SlotHeader) == 64, "wire format: one cache line");
static_assert(offsetof(SlotHeader, key_hash) == 40 && offsetof(SlotHeader, fate) == 60, "wire format");

struct ExtentHeader {
  uint32_t tail_offset;
  uint32_t tail_capacity_bytes;
  uint64_t data_offset;
  uint64_t data_bytes;
  uint64_t watermark_offset;
  uint32_t num_watermarks;
  uint32_t reserved0;
  uint64_t payload_bytes;
  uint8_t reserved1[16];
};
static_assert(sizeof(ExtentHeader) == 64, "wire format");
static_assert(offsetof(ExtentHeader, payload_bytes) == 40, "wire format");

struct DirectoryEntry {
  uint64_t key_hash;
  uint32_t slot_plus_1;
  uint32_t reserved;
};
static_assert(sizeof(DirectoryEntry) == 16, "wire format");

struct AckHeader {
  char magic[8];
  uint32_t version;
  uint32_t num_slots;
  uint8_t reserved0[48];
  uint32_t release_count;  // shared futex
  uint8_t reserved1[kPageBytes - 68];
};
static_assert(sizeof(AckHeader) == kPageBytes, "wire format: the words start on a page of their own");
static_assert(offsetof(AckHeader, release_count) == 64, "wire format");

// Byte-range locks of the .ack file; byte i is a lease on slot i.
constexpr int64_t kProducerLockByte = int64_t{1} << 62;
constexpr int64_t kAttachLockByte = kProducerLockByte + 1;

inline uint64_t ack_word(uint64_t generation, uint32_t acknowledgements) { return generation << 32 | acknowledgements; }

inline uint64_t align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

inline uint64_t key_hash(const void* key, size_t bytes) {  // FNV-1a
  uint64_t hash = 0xCBF29CE484222325;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(key)[i]) * 0x100000001B3;
  return hash;
}

// Every word that another process may look at while we write it goes through these.
template <class T>
T load_relaxed(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_RELAXED);
}
template <class T>
T load_acquire(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T, class V>
void store_relaxed(T& word, V value) {
  __atomic_store_n(&word, static_cast<T>(value), __ATOMIC_RELAXED);
}
template <class T, class V>
void store_release(T& word, V value) {
  __atomic_store_n(&word, static_cast<T>(value), __ATOMIC_RELEASE);
}

}  // namespace hsx

#endif
