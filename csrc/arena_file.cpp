#include "arena_file.h"

#include <fcntl.h>

#include <algorithm>
#include <ctime>

#include "error.h"

namespace hsx {
namespace {

constexpr uint64_t kMaxBytes = uint64_t{1} << 48;  // no address space holds more, and sums of a few stay far from 2^64
constexpr uint32_t kMaxSlots = 1u << 22;

uint64_t ack_file_bytes(uint32_t num_slots) { return align_up(kPageBytes + 8 * uint64_t{num_slots}, kPageBytes); }

Geometry plan(const hsx_arena_options& options) {
  if (options.capacity_bytes == 0 || options.capacity_bytes > kMaxBytes)
    fail(HSX_E_INVALID, "create: a capacity of %llu bytes is not in 1..2^48", ull(options.capacity_bytes));
  if (options.region_bytes > kMaxBytes || options.num_slots > kMaxSlots)
    fail(HSX_E_INVALID, "create: a region of %llu bytes or %u slots is more than 2^48 or 2^22",
         ull(options.region_bytes), options.num_slots);
  Geometry geometry = {};
  geometry.capacity_bytes = options.capacity_bytes;
  uint64_t region = options.region_bytes;
  if (region == 0) region = options.capacity_bytes + options.capacity_bytes / 32 + (1 << 20);
  geometry.region_bytes = align_up(region, kPageBytes);
  geometry.num_slots = options.num_slots;
  if (geometry.num_slots == 0)
    geometry.num_slots = static_cast<uint32_t>(std::clamp<uint64_t>(options.capacity_bytes >> 16, 1024, 65536));
  geometry.num_entries = 2;
  while (geometry.num_entries < 2 * geometry.num_slots) geometry.num_entries *= 2;
  geometry.slots_offset = kPageBytes;
  geometry.directory_offset =
      align_up(geometry.slots_offset + sizeof(SlotHeader) * uint64_t{geometry.num_slots}, kPageBytes);
  geometry.region_offset =
      align_up(geometry.directory_offset + sizeof(DirectoryEntry) * uint64_t{geometry.num_entries}, kPageBytes);
  geometry.file_bytes = geometry.region_offset + geometry.region_bytes;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  geometry.created_us = static_cast<uint64_t>(now.tv_sec) * 1000000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
  geometry.unread_ttl_us = options.unread_ttl_us;
  return geometry;
}

void write_header(ArenaHeader& header, const Geometry& geometry) {
  std::memcpy(header.magic, kArenaMagic, sizeof header.magic);
  header.version = kFormatVersion;
  header.header_bytes = kPageBytes;
  header.file_bytes = geometry.file_bytes;
  header.capacity_bytes = geometry.capacity_bytes;
  header.slots_offset = geometry.slots_offset;
  header.num_slots = geometry.num_slots;
  header.slot_bytes = sizeof(SlotHeader);
  header.directory_offset = geometry.directory_offset;
  header.num_entries = geometry.num_entries;
  header.entry_bytes = sizeof(DirectoryEntry);
  header.region_offset = geometry.region_offset;
  header.region_bytes = geometry.region_bytes;
  header.created_us = geometry.created_us;
  header.unread_ttl_us = geometry.unread_ttl_us;
}

void check(bool good, const std::string& path, const char* field, uint64_t value) {
  if (!good) fail(HSX_E_INVALID, "%s is not an arena of ours: its %s is %llu", path.c_str(), field, ull(value));
}

}  // namespace

Geometry check_header(const ArenaHeader& header, uint64_t file_bytes, const std::string& path) {
  check(std::memcmp(header.magic, kArenaMagic, sizeof header.magic) == 0, path, "magic's first byte",
        static_cast<uint8_t>(header.magic[0]));
  check(header.version == kFormatVersion, path, "format version", header.version);
  check(header.header_bytes == kPageBytes, path, "header size", header.header_bytes);
  check(header.file_bytes == file_bytes && file_bytes <= 4 * kMaxBytes, path, "file size", header.file_bytes);
  check(header.slot_bytes == sizeof(SlotHeader), path, "slot header size", header.slot_bytes);
  check(header.entry_bytes == sizeof(DirectoryEntry), path, "directory entry size", header.entry_bytes);
  auto inside = [&](uint64_t offset, uint64_t bytes, uint64_t align) {
    return offset % align == 0 && offset >= kPageBytes && offset <= file_bytes && bytes <= file_bytes - offset;
  };
  check(header.num_slots >= 1 && header.num_slots <= kMaxSlots, path, "number of slots", header.num_slots);
  check(inside(header.slots_offset, sizeof(SlotHeader) * uint64_t{header.num_slots}, sizeof(SlotHeader)), path,
        "slot table offset", header.slots_offset);
  uint32_t entries = header.num_entries;
  check((entries & (entries - 1)) == 0 && entries / 2 >= header.num_slots, path, "number of directory entries",
        entries);
  check(inside(header.directory_offset, sizeof(DirectoryEntry) * uint64_t{entries}, sizeof(DirectoryEntry)), path,
        "directory offset", header.directory_offset);
  check(inside(header.region_offset, header.region_bytes, kPageBytes), path, "region offset", header.region_offset);
  return {header.file_bytes,    header.capacity_bytes, header.slots_offset, header.directory_offset,
          header.region_offset, header.region_bytes,   header.created_us,   header.unread_ttl_us,
          header.num_slots,     header.num_entries};
}

ProducerFiles create_files(const hsx_arena_options& options) {
  std::string path = options.path;
  Geometry geometry = plan(options);

  NewFile ack_file(path + ".ack");
  ack_file.reserve(ack_file_bytes(geometry.num_slots));
  Mapping acks(ack_file.fd(), ack_file_bytes(geometry.num_slots), true, path + ".ack");
  auto& ack_header = *reinterpret_cast<AckHeader*>(acks.base());
  std::memcpy(ack_header.magic, kAckMagic, sizeof ack_header.magic);
  ack_header.version = kFormatVersion;
  ack_header.num_slots = geometry.num_slots;

  NewFile arena_file(path + ".arena");
  arena_file.reserve(geometry.file_bytes);
  Mapping arena(arena_file.fd(), geometry.file_bytes, true, path + ".arena");
  populate(arena);
  write_header(*reinterpret_cast<ArenaHeader*>(arena.base()), geometry);

  // Locked before it has a name: whoever finds the file finds its producer alive.
  auto locks = AckFile::adopt(ack_file.take_fd(), path + ".ack");
  locks->lock_producer();
  ack_file.publish();
  try {
    arena_file.publish();
  } catch (...) {
    unlink_if_same(locks->fd(), path + ".ack");
    throw;
  }
  return {ArenaView(std::move(arena), std::move(acks), geometry), std::move(locks), arena_file.take_fd()};
}

namespace {

Mapping map_arena(const std::string& path, Geometry* geometry) {
  UniqueFd fd = open_regular(path, O_RDONLY);
  uint64_t bytes = file_bytes(fd.get(), path);
  check(bytes >= kPageBytes, path, "file size", bytes);
  Mapping arena(fd.get(), bytes, false, path);
  ArenaHeader header;
  std::memcpy(&header, arena.base(), sizeof header);
  *geometry = check_header(header, bytes, path);
  return arena;
}

Mapping map_acks(int fd, uint32_t num_slots, bool writable, const std::string& path) {
  uint64_t bytes = file_bytes(fd, path);
  if (bytes != ack_file_bytes(num_slots))
    fail(HSX_E_INVALID, "%s has %llu bytes, which is not right for %u slots", path.c_str(), ull(bytes), num_slots);
  Mapping acks(fd, bytes, writable, path);
  auto& header = *reinterpret_cast<const AckHeader*>(acks.base());
  if (std::memcmp(header.magic, kAckMagic, sizeof header.magic) != 0 || header.version != kFormatVersion ||
      header.num_slots != num_slots)
    fail(HSX_E_INVALID, "%s is not the acknowledgement file of its arena", path.c_str());
  return acks;
}

}  // namespace

ReaderFiles open_files(const std::string& path) {
  Geometry geometry;
  Mapping arena = map_arena(path + ".arena", &geometry);
  auto locks = AckFile::open(path + ".ack");
  Mapping acks = map_acks(locks->fd(), geometry.num_slots, true, path + ".ack");
  return {ArenaView(std::move(arena), std::move(acks), geometry), std::move(locks)};
}

ProbedFiles probe_files(const std::string& path) {
  Geometry geometry;
  Mapping arena = map_arena(path + ".arena", &geometry);
  Mapping acks;
  ProbedFiles probed = {};
  AckFile::probe(path + ".ack", [&](AckFile& locks) {
    acks = map_acks(locks.fd(), geometry.num_slots, false, path + ".ack");
    probed.alive = locks.producer_alive();
    probed.readers_attached = locks.readers_attached();
  });
  probed.view = ArenaView(std::move(arena), std::move(acks), geometry);
  return probed;
}

}  // namespace hsx
