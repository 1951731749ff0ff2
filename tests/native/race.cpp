// A producer whose samples expire at once and whose slots and memory are taken again at once, against readers that lease them meanwhile:
// what a reader holds must not change under it. Arguments: path, "produce" or "read", milliseconds.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "hsxfer.h"

namespace {

constexpr uint64_t kWords = 512;

void need(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s: %s\n", what, hsx_last_error());
  std::_Exit(1);
}

using Clock = std::chrono::steady_clock;

void produce(const char* path, Clock::time_point end) {
  hsx_arena_options options = {path, "host", 1 << 20, 1 << 16, 0, 4, 0};  // unread samples expire at once
  hsx_arena* arena;
  need(hsx_arena_create(&options, &arena) == HSX_OK, "create");
  std::puts("ready");
  std::fflush(stdout);
  uint64_t count = 0;
  while (Clock::now() < end) {
    ++count;
    std::string key = "k" + std::to_string(count % 2);
    hsx_sample_spec spec = {};
    spec.key = key.c_str();
    spec.key_bytes = static_cast<uint32_t>(key.size());
    spec.data_bytes = spec.payload_bytes = 8 * kWords;
    spec.tail_capacity_bytes = 64;
    spec.consumers = 1;
    hsx_slot slot;
    hsx_stats stats;
    int code;
    while ((code = hsx_arena_begin(arena, &spec, &slot)) != HSX_OK) {
      need(code == HSX_E_BUSY || code == HSX_E_FULL, "begin");
      need(hsx_arena_stats(arena, &stats) == HSX_OK, "stats");
    }
    void* data;
    uint64_t data_bytes, submission, done;
    need(hsx_arena_data(arena, slot, &data, &data_bytes) == HSX_OK, "data");
    for (uint64_t i = 0; i < kWords; ++i) static_cast<uint64_t*>(data)[i] = count;
    need(hsx_submit_seal(arena, slot, "{}", 2, count % 16 == 0, &submission) == HSX_OK, "seal");
    need(hsx_wait_done(arena, submission - 1, 10000000, &done) == HSX_OK, "wait_done");
    for (int i = 0; i < 3; ++i) need(hsx_arena_stats(arena, &stats) == HSX_OK, "stats");  // and they expire
  }
  std::printf("%llu\n", static_cast<unsigned long long>(count));
  std::fflush(stdout);
  need(hsx_arena_close(arena) == HSX_OK, "close");
}

void read(const char* path, Clock::time_point end) {
  hsx_reader* reader;
  need(hsx_reader_open(path, &reader) == HSX_OK, "reader_open");
  uint64_t leased = 0, looks = 0;
  while (Clock::now() < end) {
    hsx_lease lease;
    int code = hsx_lease_wait(reader, looks++ % 2 ? "k1" : "k0", 2, 0, 0, &lease);
    if (code != HSX_OK && code != HSX_E_FAILED) continue;
    auto* words = static_cast<const volatile uint64_t*>(lease.data);
    uint64_t num_words = lease.data_bytes / 8, first = num_words ? words[0] : 0;
    need(code == HSX_OK ? num_words == kWords && first % 2 == (looks - 1) % 2 : num_words == 0, "whose sample it is");
    for (int again = 0; again < 60; ++again)
      for (uint64_t i = 0; i < num_words; ++i) need(words[i] == first, "a sample changed under its lease");
    leased += code == HSX_OK;
    need(hsx_lease_release(reader, lease.slot, lease.generation) == HSX_OK, "release");
  }
  std::printf("%llu %llu\n", static_cast<unsigned long long>(leased), static_cast<unsigned long long>(looks));
  need(hsx_reader_close(reader) == HSX_OK, "reader_close");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  auto end = Clock::now() + std::chrono::milliseconds(std::atoi(argv[3]));
  std::strcmp(argv[2], "read") == 0 ? read(argv[1], end) : produce(argv[1], end);
  return 0;
}
