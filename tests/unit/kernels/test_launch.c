/* SPDX-License-Identifier: MIT */
/* Launch records on their way: what leaves is what arrives, and what is damaged is refused. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <kernels/launch_wire.h>

#define WORKSPACE 4096

static struct launch_record some_record(void)
{
	struct launch_record record = {.code = {1, 2, 3},
				       .entry = "fmha_fwd",
				       .grid = {8, 16, 2},
				       .block = {384, 1, 1},
				       .lds_bytes = 200000,
				       .dropout_offset = offsetof(struct abi_fwd_args, dropout),
				       .sequences_offset = offsetof(struct abi_fwd_args, sequences),
				       .k_offset = offsetof(struct abi_fwd_args, k),
				       .v_offset = offsetof(struct abi_fwd_args, v),
				       .n_relocations = 2,
				       .n_maps = 1,
				       .n_zeroes = 1,
				       .zeroes = {{256, WORKSPACE - 256}},
				       .args_bytes = sizeof(struct abi_fwd_args)};

	record.args.fwd.scale = 0.5f;
	record.args.fwd.q.stride_seq = 1 << 20;
	record.overlaps = 1;
	record.relocations[0] = (struct launch_relocation){
		.offset = offsetof(struct abi_fwd_args, q.data), .base = FMHA_T_Q};
	record.relocations[1] = (struct launch_relocation){
		.offset = offsetof(struct abi_fwd_args, o_acc),
		.base = LAUNCH_WORKSPACE,
		.plus = 512};
	record.maps[0] = (struct launch_map){.dtype = ABI_BF16,
					     .swizzle = 128,
					     .box = {64, 128, 1, 1},
					     .extents = {128, 1024, 16, 2},
					     .strides = {4096, 256, 4194304}};
	return record;
}

static struct proto_launch wired(const struct launch_record *record)
{
	struct proto_launch launch = {0};

	assert_int_equal(launch_to_wire(record, &launch, NULL), 0);
	return launch;
}

static void what_leaves_arrives(void **state)
{
	struct launch_record record = some_record(), again;
	struct proto_launch launch = wired(&record);

	(void)state;
	memset(&again, 0xa5, sizeof(again));
	assert_int_equal(launch_from_wire(&launch, WORKSPACE, &again, NULL), 0);
	assert_memory_equal(again.code, record.code, sizeof(record.code));
	assert_string_equal(again.entry, record.entry);
	assert_memory_equal(again.grid, record.grid, sizeof(record.grid));
	assert_memory_equal(again.block, record.block, sizeof(record.block));
	assert_int_equal(again.lds_bytes, record.lds_bytes);
	assert_int_equal(again.overlaps, 1);
	assert_int_equal(again.dropout_offset, record.dropout_offset);
	assert_int_equal(again.sequences_offset, record.sequences_offset);
	assert_int_equal(again.k_offset, record.k_offset);
	assert_int_equal(again.v_offset, record.v_offset);
	assert_int_equal(again.n_relocations, 2);
	assert_int_equal(again.relocations[1].offset, record.relocations[1].offset);
	assert_int_equal(again.relocations[1].base, LAUNCH_WORKSPACE);
	assert_int_equal(again.relocations[1].plus, 512);
	assert_int_equal(again.n_maps, 1);
	assert_memory_equal(again.maps, record.maps, sizeof(record.maps));
	assert_int_equal(again.n_zeroes, 1);
	assert_int_equal(again.zeroes[0].offset, 256);
	assert_int_equal(again.args_bytes, record.args_bytes);
	assert_memory_equal(&again.args, &record.args, record.args_bytes);
}

/* The worker's own memory is nobody else's: it moves into the workspace first. */
static void pointers_into_the_worker_do_not_leave(void **state)
{
	struct launch_record record = some_record();
	struct proto_launch launch = {0};
	struct fmha_error err;

	(void)state;
	record.relocations[1].base = LAUNCH_INDICES;
	assert_int_equal(launch_to_wire(&record, &launch, &err), FMHA_EINTERNAL);
	launch_rebase(&record, LAUNCH_INDICES, LAUNCH_WORKSPACE, 1024);
	assert_int_equal(launch_to_wire(&record, &launch, &err), 0);
	assert_int_equal(launch.relocations[1].base, FMHA_T_WORKSPACE);
	assert_int_equal(launch.relocations[1].plus, 512 + 1024);
	record.relocations[1].base = FMHA_T_WORKSPACE; /* what a client gave under that name */
	assert_int_equal(launch_to_wire(&record, &launch, &err), FMHA_EINTERNAL);
}

static void expect_refused(const struct proto_launch *launch, int code)
{
	struct launch_record before = some_record(), record = before;
	struct fmha_error err = {0};

	assert_int_equal(launch_from_wire(launch, WORKSPACE, &record, &err), code);
	assert_int_equal(err.code, code);
	assert_true(err.msg[0] != '\0');
	assert_memory_equal(&record, &before, sizeof(record));
}

static void damage_is_refused(void **state)
{
	const struct launch_record record = some_record();
	const struct proto_launch good = wired(&record);

	(void)state;
#define REFUSED(code, ...)                                                                         \
	do {                                                                                       \
		struct proto_launch l = good;                                                      \
		__VA_ARGS__;                                                                       \
		expect_refused(&l, code);                                                          \
	} while (0)
	REFUSED(FMHA_EPROTO, l.code_bytes = 31);
	REFUSED(FMHA_EPROTO, l.entry[0] = '\0');
	REFUSED(FMHA_EPROTO, l.grid[1] = UINT64_C(1) << 31);
	REFUSED(FMHA_EPROTO, l.grid[2] = UINT64_C(1) << 32);
	REFUSED(FMHA_EPROTO, l.block[0] = 0);
	REFUSED(FMHA_ENOTSUP, l.argument_bytes = sizeof(union abi_args) + 1);
	REFUSED(FMHA_EPROTO, l.argument_bytes = 8, l.n_relocations = 1, l.n_maps = 0);
	REFUSED(FMHA_EPROTO, l.argument_bytes = 0, l.dropout_offset = 0);
	REFUSED(FMHA_EPROTO, l.dropout_offset += 4);
	REFUSED(FMHA_EPROTO, l.dropout_offset = l.argument_bytes - 8);
	REFUSED(FMHA_EPROTO, l.dropout_offset = UINT32_MAX - 7);
	REFUSED(FMHA_EPROTO, l.sequences_offset = 0);
	REFUSED(FMHA_EPROTO, l.sequences_offset += 4);
	REFUSED(FMHA_EPROTO, l.sequences_offset = l.argument_bytes - 8);
	REFUSED(FMHA_EPROTO, l.k_offset = l.argument_bytes - 8);
	REFUSED(FMHA_EPROTO, l.v_offset = UINT32_MAX - 7);
	REFUSED(FMHA_EPROTO, l.relocations[0].offset = l.argument_bytes);
	REFUSED(FMHA_EPROTO, l.relocations[1].offset = UINT32_MAX - 7);
	REFUSED(FMHA_EPROTO, l.relocations[1].offset += 4);
	REFUSED(FMHA_EPROTO, l.relocations[0].base = FMHA_N_TENSORS);
	REFUSED(FMHA_EPROTO, l.maps[0].offset = l.argument_bytes - 4);
	REFUSED(FMHA_EPROTO, l.maps[0].box[3] = 0);
	REFUSED(FMHA_EPROTO, l.maps[0].box[0] = 65536);
	REFUSED(FMHA_EPROTO, l.zeroes[0].offset = WORKSPACE + 1);
	REFUSED(FMHA_EPROTO, l.zeroes[0].bytes = WORKSPACE - 255);
	REFUSED(FMHA_EPROTO, l.zeroes[0].bytes = UINT64_MAX);
#undef REFUSED
}

static void a_state_in_memory_is_named_by_its_addresses(void **state)
{
	struct launch_record record = some_record();
	struct launch_dropout dropout = {
		.seed = 1, .offset = 2, .seed_at = 0x1000, .offset_at = 0x2000};
	struct launch_bases bases = {{0}};
	union abi_args args;

	(void)state;
	launch_bind(&record, &bases, &args);
	assert_null(args.fwd.dropout.seed_at);
	launch_set_dropout(&record, &dropout, &args);
	assert_int_equal(args.fwd.dropout.seed, 1);
	assert_int_equal(args.fwd.dropout.offset, 2);
	assert_int_equal((uintptr_t)args.fwd.dropout.seed_at, 0x1000);
	assert_int_equal((uintptr_t)args.fwd.dropout.offset_at, 0x2000);
	record.dropout_offset = 0;
	launch_bind(&record, &bases, &args);
	launch_set_dropout(&record, &dropout, &args);
	assert_int_equal(args.fwd.dropout.seed, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_leaves_arrives),
		cmocka_unit_test(pointers_into_the_worker_do_not_leave),
		cmocka_unit_test(damage_is_refused),
		cmocka_unit_test(a_state_in_memory_is_named_by_its_addresses),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
