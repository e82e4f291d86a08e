/* SPDX-License-Identifier: MIT */
/*
 * The pre-check and the reader against msgpack-c: the one accepts exactly the inputs that the
 * library reads as one object without a byte left over, and that hold no ext value; the other then
 * finds the same values. The library is asked about refused inputs, too, hence the cap on
 * allocations: 5 bytes make it ask for 16 GiB.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <msgpack.h>

#include <proto/limits.h>
#include <proto/precheck.h>

#include "reader.h"

const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "allocator_may_return_null=1:max_allocation_size_mb=64";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct tree {
	uint32_t nodes, depth, string_bytes;
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
	if (object->type == MSGPACK_OBJECT_BIN && object->via.bin.size > tree->string_bytes)
		tree->string_bytes = object->via.bin.size;
	for (uint32_t i = 0; object->type == MSGPACK_OBJECT_ARRAY && i < object->via.array.size;
	     i++)
		measure(&object->via.array.ptr[i], depth + 1, tree);
	for (uint32_t i = 0; object->type == MSGPACK_OBJECT_MAP && i < object->via.map.size; i++) {
		measure(&object->via.map.ptr[i].key, depth + 1, tree);
		measure(&object->via.map.ptr[i].val, depth + 1, tree);
	}
}

static void require(bool condition)
{
	if (!condition)
		abort();
}

static void compare_scalar(const struct value *value, const msgpack_object *object)
{
	switch (object->type) {
	case MSGPACK_OBJECT_NIL:
		require(value->type == VALUE_NIL);
		break;
	case MSGPACK_OBJECT_BOOLEAN:
		require(value->type == VALUE_BOOL && value->boolean == object->via.boolean);
		break;
	case MSGPACK_OBJECT_POSITIVE_INTEGER:
		require(value->type == VALUE_UNSIGNED && value->u64 == object->via.u64);
		break;
	case MSGPACK_OBJECT_NEGATIVE_INTEGER:
		require(value->type == VALUE_NEGATIVE && value->i64 == object->via.i64);
		break;
	case MSGPACK_OBJECT_FLOAT32:
	case MSGPACK_OBJECT_FLOAT64:
		require(value->type == VALUE_FLOAT &&
			(value->f64 == object->via.f64 ||
			 (value->f64 != value->f64 && object->via.f64 != object->via.f64)));
		break;
	case MSGPACK_OBJECT_STR:
		require(value->type == VALUE_STRING && value->n == object->via.str.size &&
			(value->n == 0 || value->text == object->via.str.ptr));
		break;
	case MSGPACK_OBJECT_BIN:
		require(value->type == VALUE_BYTES && value->n == object->via.bin.size &&
			(value->n == 0 || value->text == object->via.bin.ptr));
		break;
	default:
		abort();
	}
}

static void compare_tree(struct reader *reader, const msgpack_object *object)
{
	enum value_type peeked = reader_peek(reader);
	struct value value = reader_next(reader);

	require(value.type == peeked);
	if (object->type == MSGPACK_OBJECT_ARRAY) {
		require(value.type == VALUE_ARRAY && value.n == object->via.array.size);
		for (uint32_t i = 0; i < value.n; i++)
			compare_tree(reader, &object->via.array.ptr[i]);
	} else if (object->type == MSGPACK_OBJECT_MAP) {
		require(value.type == VALUE_MAP && value.n == object->via.map.size);
		for (uint32_t i = 0; i < value.n; i++) {
			compare_tree(reader, &object->via.map.ptr[i].key);
			compare_tree(reader, &object->via.map.ptr[i].val);
		}
	} else {
		compare_scalar(&value, object);
	}
}

static void compare(const uint8_t *data, size_t size, const struct proto_budget *budget)
{
	bool accepted = proto_precheck_budget(data, size, budget, NULL) == 0, expected;
	struct reader reader = {.at = data};
	msgpack_unpacked unpacked;
	struct tree tree = {0};
	size_t off = 0;

	msgpack_unpacked_init(&unpacked);
	expected = msgpack_unpack_next(&unpacked, (const char *)data, size, &off) ==
			   MSGPACK_UNPACK_SUCCESS &&
		   off == size;
	if (expected)
		measure(&unpacked.data, 0, &tree);
	expected = expected && !tree.ext && tree.depth <= budget->depth &&
		   tree.nodes <= budget->nodes && tree.string_bytes <= budget->string_bytes;
	require(accepted == expected);
	if (accepted) {
		compare_tree(&reader, &unpacked.data);
		require(reader.at == data + size);
	}
	msgpack_unpacked_destroy(&unpacked);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct proto_budget wide = {PROTO_PRECHECK_STACK, UINT32_MAX, UINT32_MAX};
	const struct proto_budget narrow = {3, 20, 10};

	compare(data, size, &wide);
	compare(data, size, &narrow);
	return 0;
}
