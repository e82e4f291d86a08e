/* SPDX-License-Identifier: MIT */
/*
 * launch.h: the launch record: one kernel launch as plain data, without a pointer, so that it can
 * be printed, kept and handed to another process (launch_wire.h). Dispatch makes one for each stage of a
 * plan; whoever launches binds it to the memory of one run. Nothing here depends on a device's API.
 *
 * A record's arguments are complete but for addresses: each is an offset into a base, and the bases
 * are the tensors by role, the workspace and the block of checked integers.
 */
#ifndef FMHA_LAUNCH_H
#define FMHA_LAUNCH_H

#include <stdint.h>

#include <fmha/base.h>

#include <kernels/abi.h>

enum launch_base {
	/* 0 .. FMHA_N_TENSORS - 1: element 0 of the tensor of that role */
	LAUNCH_WORKSPACE = FMHA_N_TENSORS,
	LAUNCH_INDICES, /* the copies of prefix sums, lengths and page tables that were checked */
	LAUNCH_N_BASES,
};

/* Addresses where the kernel runs; 0: absent, as are then the pointers into it. */
struct launch_bases {
	uint64_t at[LAUNCH_N_BASES];
};

/* A pointer of an argument struct. */
struct launch_relocation {
	uint16_t offset; /* in the struct, bytes */
	uint16_t base;   /* enum launch_base */
	uint64_t plus;   /* bytes from the base */
};

#define LAUNCH_RELOCATIONS 32

/*
 * A tensor as a copy engine sees it (TMA on NVIDIA's): whoever launches makes a tensor map of it
 * and of the address, which the kernel gets as a parameter of its own behind the arguments.
 * Dimensions are (dim, row, head, batch), the fastest first; copies fetch a box of them.
 */
struct launch_map {
	uint16_t offset;     /* in the arguments: the pointer to element 0 */
	uint16_t dtype;      /* enum abi_dtype */
	uint32_t swizzle;    /* bytes: how wide the pattern is in which boxes are stored */
	uint32_t box[4];     /* elements */
	uint64_t extents[4]; /* elements */
	uint64_t strides[3]; /* of dimensions 1 to 3, bytes; multiples of LAUNCH_ALIGNMENT */
};
#define LAUNCH_MAPS      4
#define LAUNCH_ALIGNED   8
#define LAUNCH_ALIGNMENT 16 /* of what a copy engine, or a wide store, is to reach */

/* A range of the workspace, in bytes. */
struct launch_range {
	uint64_t offset, bytes;
};
#define LAUNCH_RANGES 2

#define LAUNCH_HASH_BYTES  32 /* SHA-256 */
#define LAUNCH_ENTRY_BYTES 64

/*
 * What a cache that grows changes: how many keys there are, and where its batches and heads lie. Kernels read all of it from
 * their arguments, and a split that begins behind the last key is empty: so that the blocks, the workspace and the code of a
 * launch are good for any number of keys, and only how fast they are is a matter of how many they were chosen for.
 */
struct launch_keys {
	int32_t seqlen_k;
	int64_t k_stride[2], v_stride[2]; /* of a batch entry and of a head, elements */
};

/* The numbers that stand in for the dropout state of a plan's problem. */
struct launch_dropout {
	uint64_t seed, offset;
	/* Addresses where the kernel runs of words that it adds to the two, as it finds them when it
	 * runs; 0: nothing to add. */
	uint64_t seed_at, offset_at;
};

struct launch_record {
	/* GPU: the hash of the code object's bytes, zero until they have been seen, and the function
	 * in it; empty on a CPU. */
	uint8_t code[LAUNCH_HASH_BYTES];
	char entry[LAUNCH_ENTRY_BYTES];
	/* GPU: blocks and threads, dynamic LDS or shared memory in bytes. A grid with a 0: nothing
	 * to launch. All zero on a CPU. */
	uint32_t grid[3], block[3];
	uint32_t lds_bytes;
	uint32_t dropout_offset; /* of struct abi_dropout in the arguments; 0: there is none */
	/* In the arguments: of struct abi_sequences, and of K's and V's struct abi_tensor, which launch_set_keys() may
	 * change; 0: there is none. K and V are there only with the first. */
	uint32_t sequences_offset, k_offset, v_offset;
	uint32_t n_relocations;
	struct launch_relocation relocations[LAUNCH_RELOCATIONS];
	uint32_t n_maps;
	struct launch_map maps[LAUNCH_MAPS];
	/* 1: its blocks may begin while the stage before still runs: the kernel waits for that itself.
	 * Whoever launches may leave that out; launch_overlapping() is how. */
	uint32_t overlaps;
	/* Pointers in the arguments that are promised to be multiples of LAUNCH_ALIGNMENT. */
	uint32_t n_aligned;
	uint16_t aligned[LAUNCH_ALIGNED];
	/* These have to be zero before the launch, and the launches before it leave them alone. */
	uint32_t n_zeroes;
	struct launch_range zeroes[LAUNCH_RANGES];
	uint32_t args_bytes; /* of args, those of the kernel's own struct */
	union abi_args args; /* 0 where a pointer goes */
};

/* The arguments of one run. */
void launch_bind(const struct launch_record *record, const struct launch_bases *bases,
		 union abi_args *ret_args);

/* A kernel gets this for a struct launch_map and an address: CUtensorMap. */
struct launch_tensor_map {
	_Alignas(64) uint64_t words[16];
};
/* cuTensorMapEncodeTiled(), wherever its user has it from. */
typedef int (*launch_encoder)(struct launch_tensor_map *ret_map, int type, unsigned rank,
			      unsigned long long address, const uint64_t *extents,
			      const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
			      int interleave, int swizzle, int promotion, int fill);
/* The map of what @args point to. Return: the encoder's. */
int launch_encode_map(launch_encoder encode, const struct launch_map *map,
		      const union abi_args *args, struct launch_tensor_map *ret_map);

/* CUlaunchConfig, and cuLaunchKernelEx(), wherever its user has it from. */
struct launch_config;
typedef int (*launch_launcher)(const struct launch_config *config, void *function,
			       void **parameters, void **extra);
/* Launches a record that overlaps. Return: the launcher's. */
int launch_overlapping(launch_launcher launch, void *function, const struct launch_record *record,
		       void *stream, void **parameters);

/* Moves what @record points to from base @from @plus bytes into base @to. */
void launch_rebase(struct launch_record *record, enum launch_base from, enum launch_base to,
		   uint64_t plus);

/* Another dropout state than the record's, in bound arguments. */
void launch_set_dropout(const struct launch_record *record, const struct launch_dropout *state,
			union abi_args *args);

/* Other keys than the record's, in bound arguments. */
void launch_set_keys(const struct launch_record *record, const struct launch_keys *keys,
		     union abi_args *args);
/* The same in @map, one of the record's. @args: as launch_set_keys() has left them */
void launch_set_map_keys(const struct launch_record *record, const union abi_args *args,
			 struct launch_map *map);

#endif
