/* SPDX-License-Identifier: MIT */
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <proto/frame.h>
#include <proto/problem.h>

static struct proto_device some_device(void)
{
	return (struct proto_device){
		.name = "AMD EPYC 9354P",
		.arch = "x86_64_v4_bf16",
		.backend = "cpu",
		.state = "ready",
		.compute_units = 32,
		.memory_bytes = UINT64_C(405) << 30,
	};
}

/* Causal GQA attention over a strided view: K and V as [batch, head, sequence, dim]. */
static struct fmha_problem some_problem(void)
{
	struct fmha_problem p;

	fmha_problem_init(&p);
	p.batch = 2;
	p.nhead_q = 16;
	p.nhead_k = 4;
	p.seqlen_q = p.seqlen_k = 1024;
	p.hdim_q = p.hdim_v = 128;
	p.mask = FMHA_MASK_BOTTOM_RIGHT;
	p.window_right = 0;
	p.scale = 0.125f;
	p.q = (struct fmha_tensor){.buffer = 1, .dtype = FMHA_BF16};
	p.k = (struct fmha_tensor){
		.buffer = 2, .dtype = FMHA_BF16, .stride = {524288, 128, 131072, 1}};
	p.v = (struct fmha_tensor){.buffer = 2,
				   .offset = 2097152,
				   .dtype = FMHA_BF16,
				   .stride = {524288, 128, 131072, 1}};
	p.o = (struct fmha_tensor){.buffer = 3, .dtype = FMHA_BF16};
	p.lse = (struct fmha_tensor){.buffer = 3, .offset = 8388608, .dtype = FMHA_F32};
	return p;
}

/* One stage: two pointers, one of them into the workspace, and a tensor map. */
static void some_local_plan(struct proto_local_plan_result *r)
{
	*r = (struct proto_local_plan_result){
		.workspace_bytes = 4096,
		.workspace_alignment = 256,
		.flops = 8589934592.0,
		.version = 7,
		.n_tensors = 2,
		.tensors = {{.role = FMHA_T_Q, .bytes = 8388608, .alignment = 16},
			    {.role = FMHA_T_O, .bytes = 8388608, .alignment = 2}},
		.n_launches = 1,
		.launches = {{.family = "fwd",
			      .kernel = "fwd_bf16_batch_128x128",
			      .entry = "fmha_fwd",
			      .code = {0xc0, 0xde},
			      .code_bytes = PROTO_HASH_BYTES,
			      .grid = {8, 16, 2},
			      .block = {384, 1, 1},
			      .lds_bytes = 200000,
			      .dropout_offset = 16,
			      .argument_bytes = 24,
			      .n_relocations = 2,
			      .relocations = {{.offset = 0, .base = FMHA_T_Q},
					      {.offset = 8, .base = FMHA_T_WORKSPACE, .plus = 512}},
			      .n_maps = 1,
			      .maps = {{.dtype = FMHA_BF16,
					.swizzle = 128,
					.box = {64, 128, 1, 1},
					.extents = {128, 1024, 16, 2},
					.strides = {4096, 256, 4194304}}},
			      .n_zeroes = 1,
			      .zeroes = {{.offset = 512, .bytes = 3584}}}},
	};
}

static void fill_params(union proto_any_params *p, enum proto_method method)
{
	memset(p, 0, sizeof(*p));
	switch (method) {
	case PROTO_HELLO:
		p->HELLO = (struct proto_hello_params){.version = 1, .client = "example/1.0"};
		break;
	case PROTO_BUFFER_CREATE:
		p->BUFFER_CREATE.size = 8388608;
		break;
	case PROTO_BUFFER_IMPORT:
		p->BUFFER_IMPORT = (struct proto_buffer_import_params){
			.kind = PROTO_IPC_HANDLE,
			.size = 4096,
			.base_offset = 256,
			.handle = {0xde, 0xad, 0xbe, 0xef},
			.handle_bytes = 64,
		};
		break;
	case PROTO_BUFFER_RELEASE:
		p->BUFFER_RELEASE.buffer = 2;
		break;
	case PROTO_EVENT_IMPORT:
		p->EVENT_IMPORT = (struct proto_event_import_params){.handle = {0xca, 0xfe},
								     .handle_bytes = 64};
		break;
	case PROTO_EVENT_RELEASE:
		p->EVENT_RELEASE.event = 6;
		break;
	case PROTO_PLAN:
	case PROTO_EXPLAIN:
	case PROTO_LOCAL_PLAN:
		p->PLAN.problem = some_problem();
		if (method == PROTO_EXPLAIN) {
			p->PLAN.n_kernels = 2;
			(void)strcpy(p->PLAN.kernels[0].kernel, "fwd_splitkv-bf16");
			(void)strcpy(p->PLAN.kernels[1].kernel, "fwd_splitkv_combine-bf16");
		}
		break;
	case PROTO_LOCAL_RUNS:
		p->LOCAL_RUNS = (struct proto_local_runs_params){
			.problem = some_problem(), .runs = 1000, .version = 7};
		break;
	case PROTO_CODE:
		p->CODE = (struct proto_code_params){.hash = {0xc0, 0xde},
						     .hash_bytes = PROTO_HASH_BYTES};
		break;
	case PROTO_PLAN_RELEASE:
		p->PLAN_RELEASE.plan = 1;
		break;
	case PROTO_RUN:
		p->RUN = (struct proto_run_params){
			.plan = 1,
			.has_dropout_state = 1,
			.dropout_seed = 42,
			.dropout_offset = 7,
			.timeout_ms = 2000,
			.n_rebinds = 2,
			.rebinds = {{.role = FMHA_T_Q, .buffer = 4},
				    {.role = FMHA_T_O, .buffer = 3, .offset = 4096}},
			.n_waits = 1,
			.waits = {{.buffer = 5, .offset = 64, .value = 9}},
			.n_signals = 1,
			.signals = {{.event = 6}},
		};
		break;
	case PROTO_CANCEL:
		p->CANCEL.request = 70000;
		break;
	case PROTO_REGISTRY_EXPORT:
		(void)strcpy(p->REGISTRY_EXPORT.filter, "fwd*bf16*");
		break;
	case PROTO_REGISTRY_LOAD:
	case PROTO_REGISTRY_UNLOAD:
		(void)strcpy(p->REGISTRY_LOAD.set, "flash_fwd");
		break;
	case PROTO_INJECT:
		p->INJECT = (struct proto_inject_params){.fault = "hang", .after = 3};
		break;
	case PROTO_WORKER_READY:
		p->WORKER_READY.device = some_device();
		break;
	case PROTO_WORKER_ATTACH:
		p->WORKER_ATTACH = (struct proto_worker_attach_params){.session = 5,
								       .uid = 1000,
								       .gid = 1000,
								       .pid = 4242,
								       .client = "example/1.0"};
		break;
	case PROTO_COMPILE:
		p->COMPILE = (struct proto_compile_params){
			.uid = 1000,
			.urgency = PROTO_SOON,
			.build = {.name = "fwd_bf16_batch_128x128",
				  .arch = "sm_90a",
				  .source = "fmha.hip",
				  .n_options = 2,
				  .options = {"-DA=1", "-DB=2"}}};
		break;
	case PROTO_COMPILE_CANCEL:
		p->COMPILE_CANCEL.request = 7;
		break;
	default: /* all zero is right */
		break;
	}
}

static void fill_result(union proto_any_result *r, enum proto_method method)
{
	memset(r, 0, sizeof(*r));
	switch (method) {
	case PROTO_HELLO:
		r->HELLO = (struct proto_hello_result){
			.version = 1,
			.server = "fmhad/0.1.0",
			.pid = 4000,
			.max_frame_bytes = PROTO_MAX_FRAME,
			.max_in_flight = 64,
			.n_devices = 1,
		};
		break;
	case PROTO_DEVICES:
		r->DEVICES.n_devices = 2;
		r->DEVICES.devices[0] = some_device();
		r->DEVICES.devices[1] = some_device();
		r->DEVICES.devices[1].device = 1;
		break;
	case PROTO_OPEN_DEVICE:
		r->OPEN_DEVICE.device = some_device();
		r->OPEN_DEVICE.worker_pid = 4001;
		break;
	case PROTO_BUFFER_CREATE:
	case PROTO_BUFFER_IMPORT:
		r->BUFFER_CREATE = (struct proto_buffer_result){.buffer = 2, .size = 8388608};
		break;
	case PROTO_EVENT_IMPORT:
		r->EVENT_IMPORT.event = 6;
		break;
	case PROTO_PLAN:
		r->PLAN = (struct proto_plan_result){
			.plan = 1,
			.workspace_bytes = 4096,
			.flops = 8589934592.0,
			.n_stages = 1,
			.stages = {{.family = "fwd",
				    .kernel = "fwd_bf16_batch_128x128",
				    .workspace_bytes = 4096}},
		};
		break;
	case PROTO_LOCAL_PLAN:
		some_local_plan(&r->LOCAL_PLAN);
		break;
	case PROTO_LOCAL_RUNS:
		r->LOCAL_RUNS.version = 7;
		break;
	case PROTO_CODE:
		r->CODE.size = 40000;
		break;
	case PROTO_RUN:
		r->RUN = (struct proto_run_result){.queued_ns = 12000, .kernel_ns = 25000000};
		break;
	case PROTO_STATUS:
	case PROTO_EXPLAIN:
	case PROTO_REGISTRY_EXPORT:
	case PROTO_WORKER_STATUS:
		r->STATUS.size = 1234;
		break;
	case PROTO_REGISTRY_IMPORT:
	case PROTO_REGISTRY_LOAD:
	case PROTO_REGISTRY_UNLOAD:
		r->REGISTRY_LOAD.n_kernels = 96;
		break;
	case PROTO_COMPILE:
		r->COMPILE = (struct proto_compile_result){.size = 40000,
							   .hash = {0xc0, 0xde},
							   .hash_bytes = PROTO_HASH_BYTES,
							   .registers = 168,
							   .compile_ms = 700};
		break;
	default:
		break;
	}
}

static bool is_on_page(enum proto_method method)
{
	return method == PROTO_HELLO || method == PROTO_OPEN_DEVICE ||
	       method == PROTO_BUFFER_CREATE || method == PROTO_PLAN || method == PROTO_RUN ||
	       method == PROTO_LOCAL_PLAN;
}

static struct golden *golden_add(struct golden *goldens, size_t *n, const char *kind, int method,
				 const char *name, enum proto_message_type type)
{
	struct golden *golden = &goldens[(*n)++];

	*golden = (struct golden){.type = type, .method = method};
	(void)snprintf(golden->title, sizeof(golden->title), "%s %s", kind, name);
	return golden;
}

static void golden_require(int r, const struct golden *golden, const struct fmha_error *err)
{
	if (r == 0)
		return;
	(void)fprintf(stderr, "golden %s: %s\n", golden->title, err->msg);
	exit(1);
}

size_t golden_all(struct golden ret[GOLDEN_MAX])
{
	const struct fmha_error error = {
		.code = FMHA_EINVAL, .field = "hdim_q", .msg = "hdim_q 264: above 256"};
	struct fmha_error err = {0};
	struct golden *golden;
	size_t n = 0;

	for (int i = 0; i < PROTO_N_METHODS; i++) {
		uint32_t id = (uint32_t)i * 100;
		union proto_any_params params;
		union proto_any_result result;

		fill_params(&params, i);
		golden = golden_add(ret, &n, "request", i, proto_methods[i].name, PROTO_REQUEST);
		golden->on_page = is_on_page(i);
		golden_require(proto_encode_request(&golden->frame, id, i, &params, &err), golden,
			       &err);
		fill_result(&result, i);
		golden = golden_add(ret, &n, "answer", i, proto_methods[i].name, PROTO_ANSWER);
		golden->on_page = is_on_page(i);
		golden_require(proto_encode_result(&golden->frame, id, i, &result, &err), golden,
			       &err);
	}
	golden = golden_add(ret, &n, "error", -1, "hdim_q", PROTO_ANSWER);
	golden->on_page = true;
	golden_require(proto_encode_error(&golden->frame, 800, &error, &err), golden, &err);
	golden = golden_add(ret, &n, "notification", PROTO_CANCEL, "cancel", PROTO_NOTIFICATION);
	golden_require(proto_encode_notification(&golden->frame, PROTO_CANCEL,
						 &(struct proto_cancel_params){.request = 1}, &err),
		       golden, &err);
	return n;
}

void golden_free(struct golden *goldens, size_t n)
{
	for (size_t i = 0; i < n; i++)
		proto_buffer_deinit(&goldens[i].frame);
}

static int receive_body(const struct proto_message *message, int method,
			struct proto_buffer *ret_again, struct fmha_error *err)
{
	union proto_any_params params;
	union proto_any_result result;
	int r;

	if (message->type == PROTO_ANSWER && message->error.code != FMHA_OK)
		return proto_encode_error(ret_again, message->id, &message->error, err);
	if (message->type == PROTO_ANSWER) {
		if (method < 0) /* an error turned into a result on its way: any will do */
			method = PROTO_HELLO;
		r = proto_decode_result(message, method, &result, err);
		return r < 0 ? r
			     : proto_encode_result(ret_again, message->id, method, &result, err);
	}
	r = proto_decode_params(message, &params, err);
	if (r < 0)
		return r;
	if (message->method == PROTO_PLAN || message->method == PROTO_EXPLAIN)
		(void)problem_check(&params.PLAN.problem, NULL);
	if (message->type == PROTO_NOTIFICATION)
		return proto_encode_notification(ret_again, message->method, &params, err);
	return proto_encode_request(ret_again, message->id, message->method, &params, err);
}

int golden_receive(const uint8_t *data, size_t n, int method, struct proto_buffer *ret_again,
		   struct fmha_error *err)
{
	struct proto_message message = {0};
	struct proto_frame frame;
	int r;

	ret_again->size = 0;
	r = proto_frame_parse(data, n, PROTO_MAX_FRAME, &frame, err);
	if (r != 0)
		return r;
	if (n - frame.header_bytes < frame.payload_bytes)
		return PROTO_FRAME_MORE;
	r = proto_message_decode(&message, data + frame.header_bytes, frame.payload_bytes, err);
	if (r == 0)
		r = receive_body(&message, method, ret_again, err);
	proto_message_deinit(&message);
	return r;
}
