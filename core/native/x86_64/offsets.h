// Where things lie, for the assembly in this folder. agent/x86_64/offsets.cc asserts that the C++ declarations agree.
#pragma once

#define TRAMPOLINES 131072  // kTrampolines
#define TRAMPOLINE_STRIDE 16
#define TRAMPOLINE_CALL 6   // kTrampolineCall: T is so far behind its aligned beginning

// Tables with one row for each return trampoline (core/probe/entries.h), at these distances from its beginning
// (agent/layout.ld), and from T. Not all are multiples of a page: rows of one call must not look alike to a processor that
// compares 12 bits of addresses.
#define ENTRIES_FROM_BEGINNING 0x300000
#define ENTRIES_DISTANCE (ENTRIES_FROM_BEGINNING - TRAMPOLINE_CALL)
#define CALLS_DISTANCE (0x500180 - TRAMPOLINE_CALL)
#define OWNERS_DISTANCE (0x700300 - TRAMPOLINE_CALL)
#define TARGETS_DISTANCE (0x900480 - TRAMPOLINE_CALL)

#define ENTRY_REAL 0
#define ENTRY_SLOT 8
#define CALL_TICKS 0
#define CALL_SITE 8
#define CALL_LINK 12
#define OWNER_USUAL 0
#define OWNER_STATE 12
#define OWNER_TID_STATE 8  // both words
#define STATE_FREE 0  // EntryState
#define STATE_IN_USE 1

// Where the return slot is below sp and holds T, or the trampoline's beginning. DW_CFA_val_expression rip:
// lit8 minus deref const1s -16 and (the beginning) plus_uconst ENTRIES_FROM_BEGINNING deref
#define CFI_RETURN_ADDRESS_OF_TRAMPOLINE \
  .cfi_escape 0x16, 16, 12, 0x38, 0x1c, 0x06, 0x09, 0xf0, 0x1a, 0x23, ENTRIES_FROM_BEGINNING & 127 | 128, \
      ENTRIES_FROM_BEGINNING >> 7 & 127 | 128, ENTRIES_FROM_BEGINNING >> 14 & 127 | 128, ENTRIES_FROM_BEGINNING >> 21, \
      0x06

// AgentControl
#define CONTROL_SESSION 8
#define CONTROL_THREADS 16
#define CONTROL_FLAGS 48
#define NO_TICKS 4  // kControlNoTicks

// SessionHeader, Site
#define SESSION_STATE 64
#define RECORDING 1
#define SESSION_SITES 4096  // sites_offset is always this
#define SITE_BYTES_LOG2 5
#define SITE_FLAGS 24
#define USUAL 3  // kUsual: enabled, its return is hooked, nothing else

// ThreadState
#define THREAD_BYTES_LOG2 8
#define THREAD_HASH 0x9e3779b97f4a7c15
#define THREAD_HASH_SHIFT 50
#define THREAD_TID_WORD 8
#define THREAD_TID_VALUE 16
#define THREAD_RING 24
#define THREAD_FREE 32
#define THREAD_GUARD 40
#define THREAD_USUAL 104
#define THREAD_TID_IN_USE 112

// HitHandlers
#define HANDLERS_EXIT 8

// RingHeader, call records
#define RING_TAIL 128
#define RING_RESERVE 136
#define USUAL_WRITER 1  // kUsualWriter
#define RING_LIMIT 152
#define RING_MASK 160
#define RING_CALLS 192
#define RING_DATA 4096
#define CALL_RECORD_BYTES 24
#define RING_AHEAD 512  // the line of records that will be written next: the recorder has read it last
#define CALL_RETURNED 1  // record_word(call, returned, 0, 0)
#define RECORD_SITE_SHIFT 8

#define RESUME_BEHIND_RETURN 8  // in a detour: kResumeOffset - kReturnOffset
