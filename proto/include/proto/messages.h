/* SPDX-License-Identifier: MIT */
/*
 * messages.h: the decoded form of every request and answer, as messages.def declares them.
 *
 * Strings are copied into fixed arrays: a decoded message holds no pointer into the frame.
 */
#ifndef PROTO_MESSAGES_H
#define PROTO_MESSAGES_H

#include <stdint.h>

#include <fmha/base.h>
#include <proto/build.h>

#define PROTO_VERSION      2 /* 2: tensors may say their extents */
#define PROTO_VERSION_OLD  1 /* the lowest that the daemon speaks */
#define PROTO_MAX_DEVICES  16
#define PROTO_MAX_STAGES   5
#define PROTO_MAX_REBINDS  16
#define PROTO_MAX_FENCES   4
#define PROTO_NAME_BYTES   64               /* device, client and set names, NUL included */
#define PROTO_KERNEL_BYTES BUILD_NAME_BYTES /* canonical kernel names, NUL included */
#define PROTO_LAYOUT_BYTES 128              /* what a pool's pages hold, NUL included */
#define PROTO_SHARE_BYTES  32               /* random ones by which a user opens another's pool */
#define PROTO_POOL_BATCH   1024             /* pages or keys of one request */
#define PROTO_SHAPE_BYTES  160              /* the words under which times are kept, NUL included */
#define PROTO_HASH_BYTES   32

/* Limits of a plan that a client launches. */
#define PROTO_MAX_LAUNCHES    6
#define PROTO_MAX_RELOCATIONS 32
#define PROTO_MAX_MAPS        4
#define PROTO_MAX_RANGES      2
#define PROTO_ARGUMENT_BYTES  1024

/* X(NAME, word). */
#define PROTO_MEMORY_KINDS(X) X(MEMFD, memfd) X(IPC_HANDLE, ipc_handle) X(VMM_FD, vmm_fd)
#define PROTO_URGENCIES(X)    X(URGENT, urgent) X(SOON, soon) X(BACKGROUND, background)
#define PROTO_ACCESSES(X)     X(NO_ACCESS, none) X(READS, read) X(WRITES, write)
/* The wishes of an administrator that a worker has checked, to be kept and passed on. */
#define PROTO_CHANGES(X)                                                                           \
	X(CHANGE_PRIORITY, priority)                                                               \
	X(CHANGE_LIFT, lift)                                                                       \
	X(CHANGE_FORGET, forget)                                                                   \
	X(CHANGE_LOAD, load) /* with a set's document */                                           \
	X(CHANGE_UNLOAD, unload)                                                                   \
	X(CHANGE_MERGE, merge) /* with results and priorities */

#define PROTO_ENUM(NAME, word) PROTO_##NAME,
enum proto_memory_kind { PROTO_MEMORY_KINDS(PROTO_ENUM) };
enum proto_urgency { PROTO_URGENCIES(PROTO_ENUM) };
enum proto_change { PROTO_CHANGES(PROTO_ENUM) };
enum proto_access { PROTO_ACCESSES(PROTO_ENUM) };
#undef PROTO_ENUM

/* A method without params or results: an empty map on the wire. */
struct proto_empty {
	char unused;
};

/* clang-format off */
#define PROTO_STRUCT(message)  PROTO_STRUCT_(message)
#define PROTO_STRUCT_(message) proto_##message
#define BEGIN struct PROTO_STRUCT(MESSAGE) {
#define END };
#define U32(member, ...)                     uint32_t member;
#define U64(member, ...)                     uint64_t member;
#define I32(member, ...)                     int32_t member;
#define F64(member, ...)                     double member;
#define BOOL(member, ...)                    uint32_t member;
#define ENUM(member, words, ...)             uint32_t member;
#define STRING(member, bytes, ...)           char member[bytes];
#define BYTES(member, bytes, n_member, ...)  uint8_t member[bytes]; uint32_t n_member;
#define NUMBERS(member, n, ...)              uint64_t member[n];
#define SUB(member, message, ...)            struct proto_##message member;
#define PROBLEM(member, ...)                 struct fmha_problem member;
#define KERNEL_BUILD(member)                 struct kernel_build member;
#define ARRAY(member, n_member, message, most, ...) uint32_t n_member; struct proto_##message member[most];
#include <proto/messages.def>
#undef BEGIN
#undef END
#undef U32
#undef U64
#undef I32
#undef F64
#undef BOOL
#undef ENUM
#undef STRING
#undef BYTES
#undef NUMBERS
#undef SUB
#undef PROBLEM
#undef KERNEL_BUILD
#undef ARRAY
/* clang-format on */

#endif
