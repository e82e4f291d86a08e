/* SPDX-License-Identifier: MIT */
/*
 * guard_blocks.h: memory of the device behind each tensor of a case. A block is one allocation of
 * libcuda's, so that compute-sanitizer knows where it ends; in it lie a canary, the tensor's bytes
 * and another canary. Without canaries the allocation is the tensor and nothing else.
 *
 * Whatever the driver refuses fails the test.
 */
#ifndef TESTS_GPU_GUARD_BLOCKS_H
#define TESTS_GPU_GUARD_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

struct guard_block {
	unsigned long long allocation; /* 0: none */
	uint64_t front, bytes, back;   /* canary, tensor, canary */
};

/* After the device has been opened: its context is used. */
void guard_blocks_open(void);

/* @fill: every byte of the tensor. Return: false when the device has no room. */
bool guard_block_new(struct guard_block *block, uint64_t front, uint64_t bytes, uint64_t back,
		     int fill);
void guard_block_free(struct guard_block *block);

/* Where the tensor begins; an address of its own even for one of no bytes. */
void *guard_block_data(const struct guard_block *block);

void guard_block_write(const struct guard_block *block, const void *from);
void guard_block_read(const struct guard_block *block, void *to);
/* Whether the tensor's bytes are still @expected, or all @fill when that is NULL. */
bool guard_block_holds(const struct guard_block *block, const void *expected, int fill);
bool guard_block_is_intact(const struct guard_block *block);

#endif
