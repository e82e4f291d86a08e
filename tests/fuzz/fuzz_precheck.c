/* SPDX-License-Identifier: MIT */
/*
 * The pre-check against msgpack-c: it accepts exactly the inputs that the library reads as one
 * object without a byte left over, and that hold no ext value. The library is asked about refused
 * inputs, too, hence the cap on allocations: 5 bytes make it ask for 16 GiB.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <msgpack.h>

#include <proto/limits.h>
#include <proto/frame.h>

const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "allocator_may_return_null=1:max_allocation_size_mb=64";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct tree {
	uint32_t nodes, depth, string_bytes, bin_bytes;
	bool ext;
};

static void measure(const msgpack_object *object, uint32_t depth, struct tree *tree)
{
	bool container = object->type == MSGPACK_OBJECT_ARRAY || object->type == MSGPACK_OBJECT_MAP;

	tree->nodes++;
	if (container && depth + 1 > tree->depth)
		tree->depth = depth + 1;
	if (object->type == MSGPACK_OBJECT_EXT)
		tree->ext = true;
	if (object->type == MSGPACK_OBJECT_STR && object->via.str.size > tree->string_bytes)
		tree->string_bytes = object->via.str.size;
	if (object->type == MSGPACK_OBJECT_BIN && object->via.bin.size > tree->bin_bytes)
		tree->bin_bytes = object->via.bin.size;
	for (uint32_t i = 0; object->type == MSGPACK_OBJECT_ARRAY && i < object->via.array.size;
	     i++)
		measure(&object->via.array.ptr[i], depth + 1, tree);
	for (uint32_t i = 0; object->type == MSGPACK_OBJECT_MAP && i < object->via.map.size; i++) {
		measure(&object->via.map.ptr[i].key, depth + 1, tree);
		measure(&object->via.map.ptr[i].val, depth + 1, tree);
	}
}

/* What the library thinks. */
static bool library_accepts(const uint8_t *data, size_t size, struct tree *ret_tree)
{
	msgpack_unpacked unpacked;
	size_t off = 0;
	bool good;

	msgpack_unpacked_init(&unpacked);
	good = msgpack_unpack_next(&unpacked, (const char *)data, size, &off) ==
		       MSGPACK_UNPACK_SUCCESS &&
	       off == size;
	*ret_tree = (struct tree){0};
	if (good)
		measure(&unpacked.data, 0, ret_tree);
	msgpack_unpacked_destroy(&unpacked);
	return good;
}

/* Refused inputs cost the library megabytes, and half a millisecond, each: one in 16 has to do, and
 * all short ones. */
static bool is_worth_asking(const uint8_t *data, size_t size)
{
	uint32_t sum = 0;

	for (size_t i = 0; i < size; i++)
		sum = sum * 31 + data[i];
	return size < 6 || sum % 16 == 0;
}

static void compare(const uint8_t *data, size_t size, const struct proto_budget *budget)
{
	bool accepted = proto_precheck_budget(data, size, budget, NULL) == 0, expected;
	struct tree tree;

	if (!accepted && !is_worth_asking(data, size))
		return;
	expected = library_accepts(data, size, &tree) && !tree.ext && tree.depth <= budget->depth &&
		   tree.nodes <= budget->nodes && tree.string_bytes <= budget->string_bytes &&
		   tree.bin_bytes <= budget->bin_bytes;
	if (accepted != expected)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct proto_budget wide = {PROTO_PRECHECK_STACK, UINT32_MAX, UINT32_MAX, UINT32_MAX};
	const struct proto_budget narrow = {3, 20, 10, 14};

	compare(data, size, &wide);
	compare(data, size, &narrow);
	return 0;
}
