// One producer and three readers in one process, for the sanitizers: thousands of samples of random sizes, each verified by its content.
// Arguments: the arena's path, how many samples, a seed.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hsxfer.h"

namespace {

constexpr int kReaders = 3;
constexpr uint64_t kRowBytes = 96;

void need(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s: %s\n", what, hsx_last_error());
  std::_Exit(1);
}

std::string key_of(int sample) { return "sample-" + std::to_string(sample); }

// Rows of sample i: every 8 bytes say which.
void fill(std::vector<uint64_t>& words, int sample) {
  for (size_t i = 0; i < words.size(); ++i) words[i] = (uint64_t(sample) << 32) + i;
}

enum Kind { kGood, kAborted, kTwice };
Kind kind_of(int sample) { return sample % 17 == 3 ? kAborted : sample % 5 == 1 ? kTwice : kGood; }

void produce(hsx_arena* arena, int num_samples, int seed, std::atomic<int>* published) {
  std::mt19937 random(seed);
  std::vector<std::vector<uint64_t>> sources(64);
  uint64_t submission = 0, done = 0;
  for (int sample = 0; sample < num_samples; ++sample) {
    uint64_t rows = random() % 100 ? random() % 60 : random() % 3000;
    uint64_t bytes = rows * kRowBytes;
    std::string key = key_of(sample), head(random() % 300, 'h');
    hsx_sample_spec spec = {key.c_str(), head.data(), bytes + 8 * rows, bytes, uint32_t(key.size()), uint32_t(head.size()), 64,
                            uint32_t(kind_of(sample) == kTwice ? 2 : 1)};
    hsx_slot slot;
    for (;;) {
      int code = hsx_arena_begin(arena, &spec, &slot);
      if (code == HSX_OK) break;
      need(code == HSX_E_FULL, "begin");
      code = hsx_arena_wait_space(arena, 1000000);
      need(code == HSX_OK || code == HSX_E_TIMEOUT, "wait_space");
    }
    auto& source = sources[sample % sources.size()];
    need(submission < 200 || hsx_wait_done(arena, submission - 150, 10000000, &done) == HSX_OK, "wait_done");
    source.resize(bytes / 8);
    fill(source, sample);
    uint64_t first = rows ? random() % rows : 0;  // two pieces, the second one first
    hsx_copy copies[2];
    for (int piece = 0; piece < 2; ++piece) {
      uint64_t start = piece == 0 ? first : 0, count = piece == 0 ? rows - first : first;
      copies[piece] = {reinterpret_cast<char*>(source.data()) + start * kRowBytes, kRowBytes, start * kRowBytes, kRowBytes, kRowBytes, count,
                       bytes + 8 * start, 8, slot};
    }
    need(hsx_submit_copies(arena, copies, 2, nullptr, &submission) == HSX_OK, "submit_copies");
    bool abort = kind_of(sample) == kAborted;
    need(hsx_submit_seal(arena, slot, "{}", 2, abort, &submission) == HSX_OK, "submit_seal");
    published->store(sample + 1, std::memory_order_relaxed);
    hsx_stats stats;
    if (sample % 100 == 0) need(hsx_arena_stats(arena, &stats) == HSX_OK, "stats");
  }
  need(hsx_wait_done(arena, submission - 1, 20000000, &done) == HSX_OK, "last wait_done");
}

// Reader r takes the samples that are r modulo 3; those for two are looked at by the next reader too.
void consume(const char* path, int reader_number, int num_samples, std::atomic<long>* rows_read) {
  hsx_reader* reader;
  need(hsx_reader_open(path, &reader) == HSX_OK, "reader_open");
  std::vector<hsx_lease> held;
  for (int sample = 0; sample < num_samples; ++sample) {
    bool mine = sample % kReaders == reader_number || (kind_of(sample) == kTwice && (sample + 1) % kReaders == reader_number);
    if (!mine) continue;
    std::string key = key_of(sample);
    hsx_lease lease;
    bool aborted = kind_of(sample) == kAborted;  // its description may be gone already, for lack of slots
    int code = hsx_lease_wait(reader, key.c_str(), uint32_t(key.size()), 1, aborted ? 1000 : 20000000, &lease);
    if (aborted) {
      need(code == HSX_E_FAILED || code == HSX_E_LOST || code == HSX_E_TIMEOUT, "an aborted sample");
      if (code == HSX_E_FAILED) need(hsx_lease_release(reader, lease.slot, lease.generation) == HSX_OK, "release");
      continue;
    }
    need(code == HSX_OK, "lease_wait");
    uint64_t rows = lease.data_bytes / (kRowBytes + 8), bad = 0;
    auto* data = static_cast<const char*>(lease.data);
    auto* digests = reinterpret_cast<const uint64_t*>(data + rows * kRowBytes);
    std::vector<uint64_t> got(rows * kRowBytes / 8), expected(got.size());
    need(hsx_verify_rows(got.data(), kRowBytes, data, kRowBytes, kRowBytes, rows, digests, 8, &bad) == HSX_OK, "verify_rows");
    fill(expected, sample);
    need(got == expected, "the content");
    rows_read->fetch_add(long(rows), std::memory_order_relaxed);
    held.push_back(lease);
    if (held.size() > 5) {
      need(hsx_lease_release(reader, held.front().slot, held.front().generation) == HSX_OK, "release");
      held.erase(held.begin());
    }
    int alive, closed;
    if (sample % 50 == 0) need(hsx_reader_alive(reader, &alive, &closed) == HSX_OK && alive, "alive");
    hsx_probe_info info;
    if (sample % 200 == 0) need(hsx_probe(path, &info) == HSX_OK, "probe");
  }
  for (auto& lease : held) need(hsx_lease_release(reader, lease.slot, lease.generation) == HSX_OK, "release");
  need(hsx_reader_close(reader) == HSX_OK, "reader_close");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const char* path = argv[1];
  int num_samples = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  hsx_arena_options options = {path, "host", 1 << 20, 0, 600000000, 64, 0};
  hsx_arena* arena;
  need(hsx_arena_create(&options, &arena) == HSX_OK, "create");
  std::atomic<int> published{0};
  std::atomic<long> rows_read{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < kReaders; ++i) readers.emplace_back(consume, path, i, num_samples, &rows_read);
  produce(arena, num_samples, seed, &published);
  for (auto& thread : readers) thread.join();
  hsx_stats stats;
  need(hsx_arena_stats(arena, &stats) == HSX_OK, "stats");
  need(stats.payload_bytes == 0 && stats.num_unread == 0, "nothing is left");
  need(hsx_arena_close(arena) == HSX_OK, "close");
  need(hsx_arena_close(arena) == HSX_E_INVALID, "a second close");
  std::printf("%ld rows\n", rows_read.load());
  return 0;
}
