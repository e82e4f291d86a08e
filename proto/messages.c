/* SPDX-License-Identifier: MIT */
/*
 * messages.c: one row a field, for every struct that travels. The single description that the
 * encoder, the decoder and PROTOCOL.md's tables follow.
 */
#include <proto/messages.h>

#include <proto/message.h>
#include <proto/problem.h>

#include "field.h"

#define NAMES(...)                                                                                 \
	{                                                                                          \
		.names = (const char *const[]){__VA_ARGS__},                                       \
		.n = sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *),                  \
	}
#define AT(member)      .offset = offsetof(struct STRUCT, member)
#define SIZE_OF(member) .size = sizeof(((struct STRUCT *)0)->member)
#define NAME(text)      .name = (text), .name_bytes = sizeof(text) - 1
#define FIELD(member)   NAME(#member), AT(member)
#define U32(member, ...)                                                                           \
	{                                                                                          \
		FIELD(member), .type = FIELD_U32, .max = UINT32_MAX, __VA_ARGS__                   \
	}
#define U64(member, ...)                                                                           \
	{                                                                                          \
		FIELD(member), .type = FIELD_U64, .max = UINT64_MAX, __VA_ARGS__                   \
	}
#define I32(member, ...)                                                                           \
	{                                                                                          \
		FIELD(member), .type = FIELD_I32, .min = INT32_MIN, .max = INT32_MAX, __VA_ARGS__  \
	}
#define BOOL(member, ...)                                                                          \
	{                                                                                          \
		FIELD(member), .type = FIELD_BOOL, __VA_ARGS__                                     \
	}
#define F32(member, ...)                                                                           \
	{                                                                                          \
		FIELD(member), .type = FIELD_F32, __VA_ARGS__                                      \
	}
#define F64(member, ...)                                                                           \
	{                                                                                          \
		FIELD(member), .type = FIELD_F64, __VA_ARGS__                                      \
	}
#define STRING(member, ...)                                                                        \
	{                                                                                          \
		FIELD(member), SIZE_OF(member), .type = FIELD_STRING, __VA_ARGS__                  \
	}
#define ENUM(member, list, ...)                                                                    \
	{                                                                                          \
		FIELD(member), .type = FIELD_ENUM, .names = &(list), __VA_ARGS__                   \
	}
#define SUB(member, sub, ...)                                                                      \
	{                                                                                          \
		FIELD(member), .type = FIELD_STRUCT, .table = &(sub), __VA_ARGS__                  \
	}
#define ARRAY(member, n_member, sub, n, ...)                                                       \
	{                                                                                          \
		FIELD(member), .type = FIELD_ARRAY, .table = &(sub),                               \
			       .count_offset = offsetof(struct STRUCT, n_member), .capacity = (n), \
			       __VA_ARGS__                                                         \
	}
#define NUMBERS(member, ...)                                                                       \
	{                                                                                          \
		FIELD(member),                                                                     \
			.type = FIELD_NUMBERS, .max = UINT64_MAX,                                  \
			.capacity = sizeof(((struct STRUCT *)0)->member) / sizeof(uint64_t),       \
			__VA_ARGS__                                                                \
	}
#define BYTES(member, n_member, ...)                                                               \
	{                                                                                          \
		FIELD(member), SIZE_OF(member), .type = FIELD_BYTES,                               \
						.count_offset = offsetof(struct STRUCT, n_member), \
						__VA_ARGS__                                        \
	}
#define OPTIONAL       .optional = true
#define DEFAULT(value) .optional = true, .fallback = (value)
#define NOTE(text)     .note = (text)

#define TABLE(symbol, title, c_struct, rows, ...)                                                  \
	symbol = {.name = (title),                                                                 \
		  .size = sizeof(struct c_struct),                                                 \
		  .fields = (rows),                                                                \
		  .n_fields = sizeof(rows) / sizeof((rows)[0]),                                    \
		  __VA_ARGS__};                                                                    \
	_Static_assert(sizeof(rows) / sizeof((rows)[0]) <= FIELD_TABLE_MAX, "too many fields")

static const struct proto_words memory_kind_names = NAMES("memfd", "ipc_handle", "vmm_fd");
#define ROLE_NAME(NAME, name, n_dims, dims, direction) #name,
static const struct proto_words role_names = NAMES(FMHA_TENSORS(ROLE_NAME));

/* ---- errors ---- */

#define STRUCT wire_error
static const struct field error_fields[] = {
	{FIELD(code), .type = FIELD_I32, .min = INT32_MIN, .max = (uint64_t)-1,
	 NOTE("see section 6")},
	STRING(name, OPTIONAL, NOTE("of the code, without FMHA_")),
	STRING(field, OPTIONAL, NOTE("the offending field; empty: none in particular")),
	STRING(message, OPTIONAL, NOTE("one sentence")),
};
#undef STRUCT
const struct field_table TABLE(proto_error_table, "error", wire_error, error_fields);

/* ---- hello, devices ---- */

static const struct field_table empty_table = {
	.name = "empty",
	.size = sizeof(struct proto_empty),
};

#define STRUCT proto_hello_params
static const struct field hello_params_fields[] = {
	U32(version, NOTE("the highest protocol version that the client speaks")),
	STRING(client, OPTIONAL, NOTE("who is calling, for logs and status")),
};
#undef STRUCT
static const struct field_table TABLE(hello_params_table, "hello_params", proto_hello_params,
				      hello_params_fields);

#define STRUCT proto_hello_result
static const struct field hello_result_fields[] = {
	U32(version, NOTE("the version that this connection uses")),
	STRING(server, OPTIONAL, NOTE("name and version of the daemon")),
	U32(pid, OPTIONAL, NOTE("of the front")),
	U32(max_frame_bytes, NOTE("largest frame, header included")),
	U32(max_in_flight, NOTE("requests that may be unanswered on one connection")),
	U32(n_devices, NOTE("devices are numbered from 0")),
};
#undef STRUCT
static const struct field_table TABLE(hello_result_table, "hello_result", proto_hello_result,
				      hello_result_fields);

#define STRUCT proto_device
static const struct field device_fields[] = {
	U32(device, NOTE("number, stable while the daemon runs")),
	STRING(name),
	STRING(arch),
	STRING(backend, NOTE("cpu, fake, hip, cuda")),
	STRING(state, NOTE("ready, starting, restarting, failed")),
	U32(compute_units, NOTE("cores, CUs or SMs")),
	U64(memory_bytes),
	BOOL(fences, OPTIONAL, NOTE("runs wait for and write counters in its memory")),
	BOOL(events, OPTIONAL, NOTE("runs wait for and record other processes' events")),
};
#undef STRUCT
static const struct field_table TABLE(device_table, "device", proto_device, device_fields);

#define STRUCT proto_devices_result
static const struct field devices_result_fields[] = {
	ARRAY(devices, n_devices, device_table, PROTO_MAX_DEVICES),
};
#undef STRUCT
static const struct field_table TABLE(devices_result_table, "devices_result", proto_devices_result,
				      devices_result_fields);

#define STRUCT proto_open_device_params
static const struct field open_device_params_fields[] = {
	U32(device),
};
#undef STRUCT
static const struct field_table TABLE(open_device_params_table, "open_device_params",
				      proto_open_device_params, open_device_params_fields);

#define STRUCT proto_open_device_result
static const struct field open_device_result_fields[] = {
	SUB(device, device_table),
	U32(worker_pid),
};
#undef STRUCT
static const struct field_table TABLE(open_device_result_table, "open_device_result",
				      proto_open_device_result, open_device_result_fields);

/* ---- buffers ---- */

#define STRUCT proto_buffer_create_params
static const struct field buffer_create_params_fields[] = {
	U64(size, NOTE("bytes")),
};
#undef STRUCT
static const struct field_table TABLE(buffer_create_params_table, "buffer_create_params",
				      proto_buffer_create_params, buffer_create_params_fields);

#define STRUCT proto_buffer_import_params
static const struct field buffer_import_params_fields[] = {
	ENUM(kind, memory_kind_names,
	     NOTE("memfd and vmm_fd come with one fd, ipc_handle with none")),
	U64(size, NOTE("bytes of the extent")),
	U64(base_offset, OPTIONAL, NOTE("of the extent inside the allocation")),
	{FIELD(handle), SIZE_OF(handle), .type = FIELD_BYTES, OPTIONAL,
	 .count_offset = offsetof(struct proto_buffer_import_params, handle_bytes),
	 NOTE("for ipc_handle only")},
};
#undef STRUCT
static const struct field_table TABLE(buffer_import_params_table, "buffer_import_params",
				      proto_buffer_import_params, buffer_import_params_fields);

#define STRUCT proto_buffer_result
static const struct field buffer_result_fields[] = {
	U64(buffer, NOTE("id, never 0, meaningful on this connection only")),
	U64(size, NOTE("bytes")),
	ENUM(kind, memory_kind_names, OPTIONAL, NOTE("what the descriptor of buffer_create is")),
	U64(allocation_bytes, OPTIONAL, NOTE("vmm_fd: what to map, size rounded up")),
};
#undef STRUCT
static const struct field_table TABLE(buffer_result_table, "buffer_result", proto_buffer_result,
				      buffer_result_fields);

#define STRUCT proto_buffer_release_params
static const struct field buffer_release_params_fields[] = {
	U64(buffer),
};
#undef STRUCT
static const struct field_table TABLE(buffer_release_params_table, "buffer_release_params",
				      proto_buffer_release_params, buffer_release_params_fields);

/* ---- events ---- */

#define STRUCT proto_event_import_params
static const struct field event_import_params_fields[] = {
	{FIELD(handle), SIZE_OF(handle), .type = FIELD_BYTES,
	 .count_offset = offsetof(struct proto_event_import_params, handle_bytes),
	 NOTE("of an interprocess event: CUipcEventHandle")},
};
#undef STRUCT
static const struct field_table TABLE(event_import_params_table, "event_import_params",
				      proto_event_import_params, event_import_params_fields);

#define STRUCT proto_event_result
static const struct field event_result_fields[] = {
	U64(event, NOTE("id, never 0, meaningful on this connection only")),
};
#undef STRUCT
static const struct field_table TABLE(event_result_table, "event_result", proto_event_result,
				      event_result_fields);

#define STRUCT proto_event_release_params
static const struct field event_release_params_fields[] = {
	U64(event),
};
#undef STRUCT
static const struct field_table TABLE(event_release_params_table, "event_release_params",
				      proto_event_release_params, event_release_params_fields);

/* ---- problems and plans ---- */

#define STRUCT fmha_tensor
static const struct field tensor_fields[] = {
	U64(buffer, .min = 1, NOTE("id")),
	U64(offset, OPTIONAL, NOTE("bytes from the buffer's start to element 0")),
	ENUM(dtype, proto_dtype_words),
	{FIELD(stride), .type = FIELD_STRIDE, OPTIONAL,
	 NOTE("elements, one a dimension of the role; absent, or all 0 without extent: packed")},
	{FIELD(extent), .type = FIELD_EXTENT, OPTIONAL,
	 .count_offset = offsetof(struct fmha_tensor, n_dims),
	 NOTE("elements, one a dimension of the role, those that the tensor has: compared with "
	      "those "
	      "that it must have; 1 and stride 0 where it broadcasts; stride is literal then")},
};
#undef STRUCT
static const struct field_table TABLE(tensor_table, "tensor", fmha_tensor, tensor_fields);

static void problem_init_object(void *object)
{
	fmha_problem_init(object);
}

#define WIRE_CHOICE(field, value, ...)                                                             \
	ENUM(field, proto_##field##_words, DEFAULT(value), __VA_ARGS__)
#define WIRE_FLAG(field, value, ...)        BOOL(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_SIZE(field, value, ...)        I32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_NUMBER(field, value, ...)      I32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_COUNTER(field, value, ...)     U64(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_REAL(field, value, ...)        F32(field, DEFAULT(value), __VA_ARGS__)
#define WIRE_ABSENT_REAL(field, value, ...) F32(field, DEFAULT(1), __VA_ARGS__)
#define WIRE_FIELD(type, field, neutral, least, most, ops, word, option, meaning)                  \
	WIRE_##type(field, neutral, NOTE(meaning)),

#define STRUCT fmha_problem
static const struct field problem_rows[] = {
	FMHA_PROBLEM_FIELDS(WIRE_FIELD){NAME("tensors"), AT(tensor), .type = FIELD_TENSORS,
					OPTIONAL, .table = &tensor_table,
					NOTE("a map from role to tensor: those that are there")},
};
#undef STRUCT
static const struct field_table TABLE(problem_table, "problem", fmha_problem, problem_rows,
				      .init = problem_init_object);

#define STRUCT proto_kernel
static const struct field kernel_fields[] = {
	STRING(kernel, NOTE("canonical name")),
};
#undef STRUCT
static const struct field_table TABLE(kernel_table, "kernel", proto_kernel, kernel_fields);

#define STRUCT proto_plan_params
static const struct field plan_params_fields[] = {
	SUB(problem, problem_table, .anonymous = true),
	{FIELD(kernels), .type = FIELD_ARRAY, OPTIONAL, .table = &kernel_table,
	 .count_offset = offsetof(struct proto_plan_params, n_kernels),
	 .capacity = PROTO_MAX_STAGES,
	 NOTE("what the stage of that family is to run; the planner chooses the others")},
};
#undef STRUCT
static const struct field_table TABLE(plan_params_table, "plan_params", proto_plan_params,
				      plan_params_fields);

#define STRUCT proto_stage
static const struct field stage_fields[] = {
	STRING(family),
	STRING(kernel, NOTE("canonical name")),
	U64(workspace_offset, OPTIONAL),
	U64(workspace_bytes, OPTIONAL),
};
#undef STRUCT
static const struct field_table TABLE(stage_table, "stage", proto_stage, stage_fields);

#define STRUCT proto_plan_result
static const struct field plan_result_fields[] = {
	U64(plan, NOTE("id, never 0, meaningful on this connection only")),
	U64(workspace_bytes),
	F64(flops, NOTE("of one run, multiply and add counted apart")),
	ARRAY(stages, n_stages, stage_table, PROTO_MAX_STAGES),
};
#undef STRUCT
static const struct field_table TABLE(plan_result_table, "plan_result", proto_plan_result,
				      plan_result_fields);

/* ---- plans that clients launch ---- */

#define STRUCT proto_relocation
static const struct field relocation_fields[] = {
	U32(offset, NOTE("of a pointer in the arguments")),
	ENUM(base, role_names, NOTE("what it points into: a tensor, or the run's workspace")),
	U64(plus, OPTIONAL, NOTE("bytes from there")),
};
#undef STRUCT
static const struct field_table TABLE(relocation_table, "relocation", proto_relocation,
				      relocation_fields);

#define STRUCT proto_tensor_map
static const struct field tensor_map_fields[] = {
	U32(offset, NOTE("of the pointer in the arguments to what it maps")),
	ENUM(dtype, proto_dtype_words),
	U32(swizzle, NOTE("bytes")),
	NUMBERS(box, NOTE("elements, as (dim, row, head, batch)")),
	NUMBERS(extents, NOTE("elements, in that order")),
	NUMBERS(strides, NOTE("bytes, of the last three")),
};
#undef STRUCT
static const struct field_table TABLE(tensor_map_table, "tensor_map", proto_tensor_map,
				      tensor_map_fields);

#define STRUCT proto_range
static const struct field range_fields[] = {
	U64(offset, OPTIONAL, NOTE("bytes, in the workspace")),
	U64(bytes),
};
#undef STRUCT
static const struct field_table TABLE(range_table, "range", proto_range, range_fields);

#define STRUCT proto_launch
static const struct field launch_fields[] = {
	STRING(family, NOTE("as in stage, or prepare")),
	STRING(kernel, NOTE("canonical name")),
	STRING(entry, NOTE("the function in the code object")),
	BYTES(code, code_bytes, NOTE("SHA-256 of the code object, for `code`")),
	NUMBERS(grid, NOTE("blocks; one that is 0: nothing to launch")),
	NUMBERS(block, NOTE("threads")),
	U32(lds_bytes, OPTIONAL, NOTE("dynamic LDS or shared memory")),
	BYTES(arguments, argument_bytes, NOTE("the first parameter, complete but for addresses")),
	U32(dropout_offset, OPTIONAL,
	    NOTE("in the arguments, of seed, offset and two addresses of what is added to them; "
		 "0: none")),
	U32(sequences_offset, OPTIONAL,
	    NOTE("in the arguments, of five addresses and then, as int32, the number of sequences, "
		 "the longest "
		 "of Q, the longest of K, and how many rows all of Q and all of K have; 0: none")),
	U32(k_offset, OPTIONAL,
	    NOTE("in the arguments, of K's address, then, as int64 in elements, the strides of "
		 "batch, row, head "
		 "and element; 0: none")),
	U32(v_offset, OPTIONAL, NOTE("likewise of V")),
	BOOL(overlaps, OPTIONAL,
	     NOTE("it waits for the launch before it by itself, and may begin earlier")),
	ARRAY(relocations, n_relocations, relocation_table, PROTO_MAX_RELOCATIONS, OPTIONAL),
	ARRAY(maps, n_maps, tensor_map_table, PROTO_MAX_MAPS, OPTIONAL,
	      NOTE("one a further parameter")),
	ARRAY(zeroes, n_zeroes, range_table, PROTO_MAX_RANGES, OPTIONAL,
	      NOTE("what must be zero before it")),
};
#undef STRUCT
static const struct field_table TABLE(launch_table, "launch", proto_launch, launch_fields);

#define STRUCT proto_local_tensor
static const struct field local_tensor_fields[] = {
	ENUM(role, role_names),
	U64(bytes, NOTE("from its first byte to one past the last")),
	U32(alignment, NOTE("what its address is a multiple of")),
};
#undef STRUCT
static const struct field_table TABLE(local_tensor_table, "local_tensor", proto_local_tensor,
				      local_tensor_fields);

#define STRUCT proto_local_plan_result
static const struct field local_plan_result_fields[] = {
	U64(workspace_bytes, OPTIONAL),
	U64(workspace_alignment, NOTE("of its address")),
	F64(flops, NOTE("of one run, multiply and add counted apart")),
	U64(version, OPTIONAL, NOTE("for `local_runs`: other kernels have another one")),
	I32(seqlen_k_least, OPTIONAL,
	    NOTE("fewest keys that a run may have instead of the problem's")),
	I32(seqlen_k_most, OPTIONAL, NOTE("most; 0: the problem's number only")),
	U32(key_stride_unit, OPTIONAL,
	    NOTE("elements: what K's and V's strides of batch and head are then multiples of")),
	ARRAY(tensors, n_tensors, local_tensor_table, FMHA_N_TENSORS, OPTIONAL),
	ARRAY(launches, n_launches, launch_table, PROTO_MAX_LAUNCHES, OPTIONAL,
	      NOTE("in their order on a stream")),
};
#undef STRUCT
static const struct field_table TABLE(local_plan_result_table, "local_plan_result",
				      proto_local_plan_result, local_plan_result_fields);

#define STRUCT proto_local_runs_params
static const struct field local_runs_params_fields[] = {
	SUB(problem, problem_table, .anonymous = true),
	U64(runs, OPTIONAL, NOTE("since they were told last")),
	U64(version, OPTIONAL, NOTE("of the plan that is run")),
};
#undef STRUCT
static const struct field_table TABLE(local_runs_params_table, "local_runs_params",
				      proto_local_runs_params, local_runs_params_fields);

#define STRUCT proto_local_runs_result
static const struct field local_runs_result_fields[] = {
	U64(version, OPTIONAL, NOTE("another one: `local_plan` has something faster")),
};
#undef STRUCT
static const struct field_table TABLE(local_runs_result_table, "local_runs_result",
				      proto_local_runs_result, local_runs_result_fields);

#define STRUCT proto_code_params
static const struct field code_params_fields[] = {
	BYTES(hash, hash_bytes, NOTE("as a launch names its code")),
};
#undef STRUCT
static const struct field_table TABLE(code_params_table, "code_params", proto_code_params,
				      code_params_fields);

#define STRUCT proto_code_result
static const struct field code_result_fields[] = {
	U64(size, NOTE("bytes of the code object in the memfd that comes along")),
};
#undef STRUCT
static const struct field_table TABLE(code_result_table, "code_result", proto_code_result,
				      code_result_fields);

#define STRUCT proto_plan_release_params
static const struct field plan_release_params_fields[] = {
	U64(plan),
};
#undef STRUCT
static const struct field_table TABLE(plan_release_params_table, "plan_release_params",
				      proto_plan_release_params, plan_release_params_fields);

/* ---- runs ---- */

#define STRUCT proto_rebind
static const struct field rebind_fields[] = {
	ENUM(role, role_names, NOTE("a tensor that the plan's problem has")),
	U64(buffer),
	U64(offset, OPTIONAL, NOTE("bytes")),
};
#undef STRUCT
static const struct field_table TABLE(rebind_table, "rebind", proto_rebind, rebind_fields);

#define STRUCT proto_fence
static const struct field fence_fields[] = {
	U64(buffer, OPTIONAL, NOTE("of the counter; this or event")),
	U64(offset, OPTIONAL, NOTE("of the counter: bytes, a multiple of 4")),
	U32(value, OPTIONAL, NOTE("of the counter")),
	U64(event, OPTIONAL, NOTE("an imported event, without the other three")),
};
#undef STRUCT
static const struct field_table TABLE(fence_table, "fence", proto_fence, fence_fields);

#define STRUCT proto_run_params
static const struct field run_params_fields[] = {
	U64(plan),
	BOOL(has_dropout_state, OPTIONAL,
	     NOTE("false: the seed and offset that the plan was made with")),
	U64(dropout_seed, OPTIONAL),
	U64(dropout_offset, OPTIONAL),
	U32(timeout_ms, OPTIONAL, NOTE("0: the daemon's own deadline")),
	{FIELD(rebinds), .type = FIELD_ARRAY, OPTIONAL, .table = &rebind_table,
	 .count_offset = offsetof(struct proto_run_params, n_rebinds),
	 .capacity = PROTO_MAX_REBINDS},
	{FIELD(waits), .type = FIELD_ARRAY, OPTIONAL, .table = &fence_table,
	 .count_offset = offsetof(struct proto_run_params, n_waits), .capacity = PROTO_MAX_FENCES,
	 NOTE("the device waits for these before it runs the plan")},
	{FIELD(signals), .type = FIELD_ARRAY, OPTIONAL, .table = &fence_table,
	 .count_offset = offsetof(struct proto_run_params, n_signals), .capacity = PROTO_MAX_FENCES,
	 NOTE("the device writes or records these when it is done")},
};
#undef STRUCT
static const struct field_table TABLE(run_params_table, "run_params", proto_run_params,
				      run_params_fields);

#define STRUCT proto_run_result
static const struct field run_result_fields[] = {
	U64(queued_ns, NOTE("from arrival to the first stage")),
	U64(kernel_ns, NOTE("all stages")),
};
#undef STRUCT
static const struct field_table TABLE(run_result_table, "run_result", proto_run_result,
				      run_result_fields);

#define STRUCT proto_cancel_params
static const struct field cancel_params_fields[] = {
	U32(request, NOTE("message id of the run")),
};
#undef STRUCT
static const struct field_table TABLE(cancel_params_table, "cancel_params", proto_cancel_params,
				      cancel_params_fields);

/* ---- registry, status ---- */

#define STRUCT proto_json_result
static const struct field json_result_fields[] = {
	U64(size, NOTE("bytes of UTF-8 JSON in the memfd that comes along")),
};
#undef STRUCT
static const struct field_table TABLE(json_result_table, "json_result", proto_json_result,
				      json_result_fields);

#define STRUCT proto_registry_export_params
static const struct field registry_export_params_fields[] = {
	STRING(filter, OPTIONAL, NOTE("empty: everything")),
};
#undef STRUCT
static const struct field_table TABLE(registry_export_params_table, "registry_export_params",
				      proto_registry_export_params, registry_export_params_fields);

#define STRUCT proto_registry_set_params
static const struct field registry_set_params_fields[] = {
	STRING(set),
};
#undef STRUCT
static const struct field_table TABLE(registry_set_params_table, "registry_set_params",
				      proto_registry_set_params, registry_set_params_fields);

#define STRUCT proto_registry_result
static const struct field registry_result_fields[] = {
	U64(n_kernels, NOTE("registry_forget: results")),
	BOOL(stored, OPTIONAL, NOTE("true: a restart keeps what was changed")),
};
#undef STRUCT
static const struct field_table TABLE(registry_result_table, "registry_result",
				      proto_registry_result, registry_result_fields);

#define STRUCT proto_registry_kernel_params
static const struct field registry_kernel_params_fields[] = {
	STRING(kernel, NOTE("canonical name")),
};
#undef STRUCT
static const struct field_table TABLE(registry_kernel_params_table, "registry_kernel_params",
				      proto_registry_kernel_params, registry_kernel_params_fields);

#define STRUCT proto_registry_priority_params
static const struct field registry_priority_params_fields[] = {
	STRING(kernel, NOTE("canonical name")),
	I32(priority, NOTE("the higher the sooner; 0: none, as at first")),
};
#undef STRUCT
static const struct field_table TABLE(registry_priority_params_table, "registry_priority_params",
				      proto_registry_priority_params,
				      registry_priority_params_fields);

#define STRUCT proto_registry_forget_params
static const struct field registry_forget_params_fields[] = {
	STRING(kernel, OPTIONAL, NOTE("pattern with * and ? over canonical names; empty: all")),
	STRING(shape, OPTIONAL, NOTE("of the results, as registry_get has it; empty: all")),
};
#undef STRUCT
static const struct field_table TABLE(registry_forget_params_table, "registry_forget_params",
				      proto_registry_forget_params, registry_forget_params_fields);

/* ---- tuning ---- */

#define STRUCT proto_tune_params
static const struct field tune_params_fields[] = {
	SUB(problem, problem_table, NOTE("of its tensors, types and strides; buffers are any")),
	STRING(shape, OPTIONAL, NOTE("of the census, in place of the problem")),
	U32(budget_ms, OPTIONAL, NOTE("of device time; 0: until all candidates are measured")),
	BOOL(again, OPTIONAL, NOTE("also what was measured before")),
	BOOL(thorough, OPTIONAL, NOTE("also what is estimated to be far too slow")),
};
#undef STRUCT
static const struct field_table TABLE(tune_params_table, "tune_params", proto_tune_params,
				      tune_params_fields);

#define STRUCT proto_tune_result
static const struct field tune_result_fields[] = {
	STRING(shape, NOTE("the word under which its times are kept")),
	STRING(kernel, OPTIONAL, NOTE("the fastest; empty: nothing was measured")),
	I32(n_splits, OPTIONAL),
	F64(us, OPTIONAL, NOTE("of its whole plan")),
	U32(n_candidates, NOTE("kernels and splits that can run it")),
	U32(n_measured, NOTE("now")),
	U32(n_failed, OPTIONAL, NOTE("that could not be built or run")),
};
#undef STRUCT
static const struct field_table TABLE(tune_result_table, "tune_result", proto_tune_result,
				      tune_result_fields);

/* ---- tests, and between a front and its worker ---- */

#define STRUCT proto_inject_params
static const struct field inject_params_fields[] = {
	STRING(fault, NOTE("hang, abort, oom, sticky")),
	U32(after, OPTIONAL, NOTE("launches that still succeed")),
};
#undef STRUCT
static const struct field_table TABLE(inject_params_table, "inject_params", proto_inject_params,
				      inject_params_fields);

#define STRUCT proto_worker_ready_params
static const struct field worker_ready_params_fields[] = {
	SUB(device, device_table),
	STRING(model, OPTIONAL, NOTE("what measured times hold for")),
	STRING(driver, OPTIONAL),
	STRING(compiler, OPTIONAL, NOTE("of built-in kernels; empty: the front's")),
	STRING(sources, OPTIONAL, NOTE("likewise: a digest")),
};
#undef STRUCT
static const struct field_table TABLE(worker_ready_params_table, "worker_ready_params",
				      proto_worker_ready_params, worker_ready_params_fields);

#define STRUCT proto_tuned_result_params
static const struct field tuned_result_params_fields[] = {
	STRING(kernel), STRING(shape), I32(n_splits), F64(us), U64(when_s),
};
#undef STRUCT
static const struct field_table TABLE(tuned_result_params_table, "tuned_result_params",
				      proto_tuned_result_params, tuned_result_params_fields);

static const struct proto_words change_names = NAMES("priority", "lift", "forget", "load", "unload",
						     "merge");

#define STRUCT proto_registry_change_params
static const struct field registry_change_params_fields[] = {
	ENUM(change, change_names, NOTE("load and merge come with a document")),
	U32(uid, NOTE("whose wish it is")),
	STRING(name, OPTIONAL, NOTE("kernel, pattern or set")),
	STRING(shape, OPTIONAL),
	I32(priority, OPTIONAL),
};
#undef STRUCT
static const struct field_table TABLE(registry_change_params_table, "registry_change_params",
				      proto_registry_change_params, registry_change_params_fields);

#define STRUCT proto_worker_attach_params
static const struct field worker_attach_params_fields[] = {
	U64(session), U32(uid), U32(gid), U32(pid), STRING(client, OPTIONAL),
};
#undef STRUCT
static const struct field_table TABLE(worker_attach_params_table, "worker_attach_params",
				      proto_worker_attach_params, worker_attach_params_fields);

static const struct proto_words urgency_names = NAMES("urgent", "soon", "background");

#define STRUCT proto_compile_option
static const struct field compile_option_fields[] = {
	STRING(text, NOTE("a macro, -DNAME=VALUE")),
};
#undef STRUCT
static const struct field_table TABLE(compile_option_table, "compile_option", proto_compile_option,
				      compile_option_fields);

#define STRUCT proto_compile_params
static const struct field compile_params_fields[] = {
	U32(uid, NOTE("on whose behalf")),
	ENUM(urgency, urgency_names, DEFAULT(PROTO_URGENT), NOTE("urgent: a request waits for it")),
	STRING(kernel, NOTE("canonical name")),
	STRING(arch),
	STRING(source, NOTE("file name in the folder of kernel sources")),
	ARRAY(options, n_options, compile_option_table, PROTO_MAX_OPTIONS),
};
#undef STRUCT
static const struct field_table TABLE(compile_params_table, "compile_params", proto_compile_params,
				      compile_params_fields);

#define STRUCT proto_compile_result
static const struct field compile_result_fields[] = {
	U64(size, NOTE("bytes of the code object in the memfd that comes along")),
	U32(registers, OPTIONAL),
	U32(spills, OPTIONAL, NOTE("bytes of registers per lane that go to memory")),
	U32(lds_bytes, OPTIONAL),
	U32(compile_ms, OPTIONAL, NOTE("of the build, whenever it was")),
};
#undef STRUCT
static const struct field_table TABLE(compile_result_table, "compile_result", proto_compile_result,
				      compile_result_fields);

#define STRUCT proto_compile_cancel_params
static const struct field compile_cancel_params_fields[] = {
	U32(request, NOTE("message id of the compile, which is answered all the same")),
};
#undef STRUCT
static const struct field_table TABLE(compile_cancel_params_table, "compile_cancel_params",
				      proto_compile_cancel_params, compile_cancel_params_fields);

/* ---- methods ---- */

const struct proto_method_info proto_methods[PROTO_N_METHODS] = {
#define METHOD_INFO(ID, method, by, in, out, params, result)                                       \
	[PROTO_##ID] = {                                                                           \
		.name = (method),                                                                  \
		.name_bytes = sizeof(method) - 1,                                                  \
		.server = PROTO_##by,                                                              \
		.fds_in = (in),                                                                    \
		.fds_out = (out),                                                                  \
		.params_size = sizeof(struct proto_##params),                                      \
		.result_size = sizeof(struct proto_##result),                                      \
	},
	PROTO_METHODS(METHOD_INFO)};

const struct field_table *const proto_params_tables[PROTO_N_METHODS] = {
#define METHOD_PARAMS(ID, method, by, in, out, params, result) [PROTO_##ID] = &params##_table,
	PROTO_METHODS(METHOD_PARAMS)};

const struct field_table *const proto_result_tables[PROTO_N_METHODS] = {
#define METHOD_RESULT(ID, method, by, in, out, params, result) [PROTO_##ID] = &result##_table,
	PROTO_METHODS(METHOD_RESULT)};

const struct field_table *const proto_tables[] = {
	&hello_params_table,
	&hello_result_table,
	&device_table,
	&devices_result_table,
	&open_device_params_table,
	&open_device_result_table,
	&buffer_create_params_table,
	&buffer_import_params_table,
	&buffer_result_table,
	&buffer_release_params_table,
	&event_import_params_table,
	&event_result_table,
	&event_release_params_table,
	&kernel_table,
	&plan_params_table,
	&problem_table,
	&tensor_table,
	&plan_result_table,
	&stage_table,
	&plan_release_params_table,
	&local_plan_result_table,
	&local_tensor_table,
	&launch_table,
	&relocation_table,
	&tensor_map_table,
	&range_table,
	&local_runs_params_table,
	&local_runs_result_table,
	&code_params_table,
	&code_result_table,
	&run_params_table,
	&rebind_table,
	&fence_table,
	&run_result_table,
	&cancel_params_table,
	&json_result_table,
	&registry_export_params_table,
	&registry_set_params_table,
	&registry_result_table,
	&registry_kernel_params_table,
	&registry_priority_params_table,
	&registry_forget_params_table,
	&tune_params_table,
	&tune_result_table,
	&inject_params_table,
	&worker_ready_params_table,
	&worker_attach_params_table,
	&compile_option_table,
	&compile_params_table,
	&compile_result_table,
	&compile_cancel_params_table,
	&tuned_result_params_table,
	&registry_change_params_table,
	&proto_error_table,
	NULL,
};

int proto_request_fds(enum proto_method method, const void *params)
{
	const struct proto_buffer_import_params *import = params;
	const struct proto_registry_change_params *change = params;

	if (method == PROTO_BUFFER_IMPORT && import->kind == PROTO_IPC_HANDLE)
		return 0;
	if (method == PROTO_REGISTRY_CHANGE && change->change != PROTO_CHANGE_LOAD &&
	    change->change != PROTO_CHANGE_MERGE)
		return 0;
	return proto_methods[method].fds_in;
}
