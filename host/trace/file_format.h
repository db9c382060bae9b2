// The bytes of the trace file: docs/formats.md says the same in prose.
#pragma once

#include <cstdint>

namespace sonde::host {

constexpr char kTraceMagic[8] = {'S', 'O', 'N', 'D', 'E', 'T', 'R', '1'};
constexpr uint32_t kTraceVersion = 5;
constexpr uint32_t kChunkMagic = 0x4b484353;  // "SCHK"
constexpr uint32_t kMaxChunkBytes = 64 << 20;

struct FileHeader {
  char magic[8];
  uint32_t version, reserved;
};

enum ChunkKind : uint32_t { kChunkMeta = 1, kChunkRecords = 2, kChunkEnd = 3, kChunkSums = 4 };

struct ChunkHeader {
  uint32_t magic;
  uint32_t kind;    // ChunkKind
  uint32_t packed;  // bytes that follow: one zstd frame, or if they are as many as raw, these themselves
  uint32_t raw;     // bytes it unpacks to
  uint32_t crc;     // CRC-32 (as zlib has it) of the packed bytes
  uint32_t header_crc;  // CRC-32 of the fields above
};

}  // namespace sonde::host
