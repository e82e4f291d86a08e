/* SPDX-License-Identifier: MIT */
/*
 * slot.c: see fmha/slot.h.
 *
 * A call is described in a row of numbers: what its tensors are, but not where, and what it says besides. The table of problems
 * is kept by that row. Whoever launches one holds the table's lock for reading, so that forgetting waits for launches, and
 * never the other way round: a call that finds the lock taken for writing waits for some numbers to be stored.
 */
#include "fmha/slot.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dlfcn.h>

#include <fmha/fmha_local.h>

#include "exception.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

/* How torch passes arguments and results: a number's bits, a tensor's handle (owned), an option's address or 0. */
typedef uint64_t word;
typedef void *tensor;

/* Conversions as torch 2.11 made them, which later versions keep for who asks. */
#define TORCH_BUILD ((UINT64_C(2) << 56) | (UINT64_C(11) << 48))

static tensor as_tensor(word handle)
{
	return (tensor)(uintptr_t)handle; // NOLINT: as torch passes it
}

static word as_word(tensor handle)
{
	return (word)(uintptr_t)handle;
}

/* ---- torch's functions ---- */

static struct {
	int (*delete_tensor)(tensor);
	int (*new_handle)(tensor, tensor *);
	int (*new_undefined)(tensor *);
	int (*is_defined)(tensor, bool *);
	int (*data)(tensor, void **);
	int (*dim)(tensor, int64_t *);
	int (*sizes)(tensor, int64_t **);
	int (*strides)(tensor, int64_t **);
	int (*dtype)(tensor, int32_t *);
	int (*device_type)(tensor, int32_t *);
	int (*device_index)(tensor, int32_t *);
	int (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
		     tensor *);
	int32_t (*uint8)(void);
	int (*library_new)(const char *, const char *, const char *, uint32_t, void **);
	int (*library_impl)(void *, const char *, void (*)(word *, uint64_t, uint64_t), uint64_t);
	int (*library_delete)(void *);
	int (*call)(const char *, const char *, word *, uint64_t);
	int (*current_device)(int32_t *);
	int (*current_stream)(int32_t, void **);
	int (*is_capturing)(void *, int *);
	/* at::globalContext().deterministicAlgorithms(): the shim has nothing that says it. */
	const void *(*context)(void);
	bool (*is_deterministic)(const void *);
} torch;

static const struct {
	void **at;
	const char *name;
} CORE[] = {
	{(void **)&torch.delete_tensor, "aoti_torch_delete_tensor_object"},
	{(void **)&torch.new_handle, "aoti_torch_new_tensor_handle"},
	{(void **)&torch.new_undefined, "aoti_torch_new_uninitialized_tensor"},
	{(void **)&torch.is_defined, "aoti_torch_is_defined"},
	{(void **)&torch.data, "aoti_torch_get_data_ptr"},
	{(void **)&torch.dim, "aoti_torch_get_dim"},
	{(void **)&torch.sizes, "aoti_torch_get_sizes"},
	{(void **)&torch.strides, "aoti_torch_get_strides"},
	{(void **)&torch.dtype, "aoti_torch_get_dtype"},
	{(void **)&torch.device_type, "aoti_torch_get_device_type"},
	{(void **)&torch.device_index, "aoti_torch_get_device_index"},
	{(void **)&torch.empty, "aoti_torch_empty_strided"},
	{(void **)&torch.uint8, "aoti_torch_dtype_uint8"},
	{(void **)&torch.library_new, "aoti_torch_library_init_impl"},
	{(void **)&torch.library_impl, "torch_library_impl"},
	{(void **)&torch.library_delete, "aoti_torch_delete_library_object"},
	{(void **)&torch.call, "torch_call_dispatcher"},
	{(void **)&torch.current_device, "aoti_torch_get_current_device_index"},
	{(void **)&torch.context, "_ZN2at13globalContextEv"},
	{(void **)&torch.is_deterministic, "_ZNK2at7Context23deterministicAlgorithmsEv"},
};

/* Of a library that is loaded already. Its handle is never given back: torch does not go before the process does. */
static void *symbol_of(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);

	return handle ? dlsym(handle, name) : NULL;
}

static int no_stream(int32_t index, void **ret_stream)
{
	(void)index;
	*ret_stream = NULL;
	return 0;
}

static int never_capturing(void *stream, int *ret_state)
{
	(void)stream;
	*ret_state = 0;
	return 0;
}

static const char *find_torch(bool on_host)
{
	for (size_t i = 0; i < LENGTH(CORE); i++) {
		*CORE[i].at = symbol_of("libtorch_cpu.so", CORE[i].name);
		if (!*CORE[i].at)
			return CORE[i].name;
	}
	if (on_host) {
		torch.current_stream = no_stream;
		torch.is_capturing = never_capturing;
		return NULL;
	}
	*(void **)&torch.current_stream = symbol_of("libtorch_cuda.so",
						    "aoti_torch_get_current_cuda_stream");
	*(void **)&torch.is_capturing = symbol_of("libcuda.so.1", "cuStreamIsCapturing");
	if (!torch.current_stream)
		return "aoti_torch_get_current_cuda_stream";
	return torch.is_capturing ? NULL : "cuStreamIsCapturing";
}

/* ---- problems ---- */

#define ALIGNMENT  16 /* of addresses: others go Python's way */
#define MOST_WORDS 72
#define MOST_MADE  3
#define N_BUCKETS  1024

/* A row of numbers that is the same for calls that one plan serves. */
struct row {
	uint32_t n;
	int64_t words[MOST_WORDS];
};

/* A tensor that each run makes. */
struct made {
	uint32_t role;
	int32_t dtype;
	int64_t dim, sizes[4], strides[4];
};

struct problem {
	struct problem *next;
	uint64_t hash;
	struct row row;
	struct fmha_local_plan *plan;
	uint64_t workspace_bytes;
	struct fmha_local_keys keys;
	bool has_keys;
	uint8_t *captured;
	uint32_t n_made;
	struct made made[MOST_MADE];
	uint32_t n_constants; /* results that say nothing: the same tensors each time */
	tensor constants[3];
};

/* One call: its row, and where its tensors lie. */
struct call {
	struct row row;
	uintptr_t alignment; /* the addresses, or-ed */
	int32_t device_type, device_index;
	const void *tensors[FMHA_N_TENSORS];
};

/* What a thread's call in Python says of itself. */
struct pending {
	const struct call *call; /* NULL: it cannot be remembered */
	bool learned, raises;
	uint64_t generation;
	struct problem found;
	struct slot_exception exception;
};

static struct {
	struct fmha_slot_options options;
	bool on_host;
	void *library;
	pthread_rwlock_t lock; /* of what follows */
	uint64_t generation;   /* how often all was forgotten */
	struct problem *buckets[N_BUCKETS];
	struct fmha_slot_counts counts; /* atomic */
} slot = {.lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP};

static __thread struct pending *pending;

static uint64_t hash_of(const struct row *row)
{
	uint64_t hash = row->n;

	for (uint32_t i = 0; i < row->n; i++) {
		hash = (hash ^ (uint64_t)row->words[i]) * UINT64_C(0x9e3779b97f4a7c15);
		hash ^= hash >> 32;
	}
	return hash;
}

static struct problem *row_find(const struct row *row, uint64_t hash)
{
	struct problem *problem = slot.buckets[hash % N_BUCKETS];

	while (problem &&
	       (problem->hash != hash || problem->row.n != row->n ||
		memcmp(problem->row.words, row->words, row->n * sizeof(row->words[0])) != 0))
		problem = problem->next;
	return problem;
}

static void call_put(struct call *call, int64_t number)
{
	call->row.words[call->row.n++] = number;
}

/* Adds a tensor to the call. Return: whether calls with it can be remembered. */
static bool call_describe(struct call *call, uint32_t role, tensor t)
{
	int64_t dim = 0, *sizes = NULL, *strides = NULL;
	int32_t dtype = 0, type = 0, index = 0;
	void *data = NULL;
	bool defined = false;

	if (torch.is_defined(t, &defined) != 0 || !defined)
		return false;
	if (torch.dim(t, &dim) != 0 || dim > 4 || torch.sizes(t, &sizes) != 0 ||
	    torch.strides(t, &strides) != 0 || torch.dtype(t, &dtype) != 0 ||
	    torch.device_type(t, &type) != 0 || torch.device_index(t, &index) != 0 ||
	    torch.data(t, &data) != 0)
		return false;
	call_put(call, dim);
	for (int64_t i = 0; i < dim; i++) {
		call_put(call, sizes[i]);
		call_put(call, strides[i]);
	}
	call_put(call, (int64_t)dtype << 32 | (int64_t)type << 16 | (index & 0xffff));
	call->alignment |= (uintptr_t)data;
	call->tensors[role] = data;
	call->device_type = type;
	call->device_index = index;
	return true;
}

/* What a call says besides its tensors. */
static void describe_words(struct call *call, word is_causal, word scale, bool deterministic)
{
	call_put(call, (int64_t)(is_causal & 0xff) | (int64_t)deterministic << 8 |
			       (int64_t)(scale != 0) << 9);
	call_put(call,
		 scale ? *(const int64_t *)(uintptr_t)scale : 0); // NOLINT: as torch passes it
}

static bool is_here(const struct call *call)
{
	int32_t index;

	if (call->alignment % ALIGNMENT)
		return false;
	return slot.on_host || (torch.current_device(&index) == 0 && index == call->device_index);
}

/* ---- a run ---- */

static void delete_tensors(tensor *tensors, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		(void)torch.delete_tensor(tensors[i]);
}

/* @ret_made: given. Return: how many could be made. */
static uint32_t make_tensors(const struct problem *problem, struct call *call, tensor *ret_made)
{
	uint32_t n = 0;

	for (; n < problem->n_made; n++) {
		const struct made *made = &problem->made[n];
		void *data = NULL;

		if (torch.empty(made->dim, made->sizes, made->strides, made->dtype,
				call->device_type, call->device_index, &ret_made[n]) != 0)
			break;
		(void)torch.data(ret_made[n], &data);
		call->tensors[made->role] = data;
	}
	return n;
}

static int run(const struct problem *problem, const struct call *call)
{
	const int64_t bytes = (int64_t)problem->workspace_bytes, one = 1;
	struct fmha_local_run run = {.struct_size = sizeof(run),
				     .n_tensors = FMHA_N_TENSORS,
				     .tensors = call->tensors,
				     .keys = problem->has_keys ? &problem->keys : NULL};
	struct fmha_error error;
	tensor workspace = NULL;
	int capturing = 0, r = torch.current_stream(call->device_index, &run.stream);

	if (r == 0 && bytes > 0) {
		r = torch.empty(1, &bytes, &one, torch.uint8(), call->device_type,
				call->device_index, &workspace);
		if (r == 0)
			(void)torch.data(workspace, &run.workspace);
	}
	if (r == 0) {
		/* A driver that does not say is taken to capture: then the plan stays. */
		if (torch.is_capturing(run.stream, &capturing) != 0 || capturing)
			__atomic_store_n(problem->captured, 1, __ATOMIC_RELAXED);
		r = slot.options.run(problem->plan, &run, &error);
	}
	/* Freed at once: the allocator gives it to nobody before the stream has got past this run. */
	if (workspace)
		(void)torch.delete_tensor(workspace);
	return r;
}

/* Launches the call if its problem is known. @ret_made, @ret_constants: given. Return: whether it did; Python tells errors. */
static bool launch(struct call *call, tensor *ret_made, tensor *ret_constants)
{
	const uint64_t hash = hash_of(&call->row);
	const struct problem *problem;
	bool done = false;

	(void)pthread_rwlock_rdlock(&slot.lock);
	problem = row_find(&call->row, hash);
	if (problem) {
		uint32_t n = make_tensors(problem, call, ret_made);

		done = n == problem->n_made && run(problem, call) == 0;
		for (uint32_t i = 0; done && i < problem->n_constants; i++)
			(void)torch.new_handle(problem->constants[i], &ret_constants[i]);
		if (!done)
			delete_tensors(ret_made, n);
	}
	(void)pthread_rwlock_unlock(&slot.lock);
	return done;
}

/* ---- the way over Python ---- */

static void problem_free(struct problem *problem)
{
	delete_tensors(problem->constants, problem->n_constants);
	free(problem);
}

static bool made_like(struct made *made, uint32_t role, tensor t)
{
	int64_t *sizes = NULL, *strides = NULL;

	made->role = role;
	if (torch.dim(t, &made->dim) != 0 || made->dim > 4 || torch.sizes(t, &sizes) != 0 ||
	    torch.strides(t, &strides) != 0 || torch.dtype(t, &made->dtype) != 0)
		return false;
	memcpy(made->sizes, sizes, (size_t)made->dim * sizeof(*sizes));
	memcpy(made->strides, strides, (size_t)made->dim * sizeof(*strides));
	return true;
}

/* Keeps what was learned, with results like @results: @roles are theirs. @constants: those that say nothing. */
static void remember(const struct pending *from, const uint32_t *roles, const word *results,
		     uint32_t n_results, const word *constants, uint32_t n_constants)
{
	struct problem *problem = malloc(sizeof(*problem));
	bool good = true;

	if (!problem)
		return;
	*problem = from->found;
	problem->row = from->call->row;
	problem->hash = hash_of(&problem->row);
	problem->n_made = n_results;
	problem->n_constants = 0;
	for (uint32_t i = 0; good && i < n_results; i++)
		good = made_like(&problem->made[i], roles[i], as_tensor(results[i]));
	for (uint32_t i = 0; good && i < n_constants; i++) {
		good = torch.new_handle(as_tensor(constants[i]), &problem->constants[i]) == 0;
		problem->n_constants += good;
	}
	(void)pthread_rwlock_wrlock(&slot.lock);
	/* Another thread may have learned it, or somebody forgotten all, and then the plan may be gone. */
	good = good && from->generation == slot.generation &&
	       !row_find(&problem->row, problem->hash);
	if (good) {
		struct problem **bucket = &slot.buckets[problem->hash % N_BUCKETS];

		problem->next = *bucket;
		*bucket = problem;
		(void)__atomic_add_fetch(&slot.counts.known, 1, __ATOMIC_RELAXED);
	}
	(void)pthread_rwlock_unlock(&slot.lock);
	if (!good)
		problem_free(problem);
}

/* @stack: arguments, which go along, and then @n_results tensors. Does not return where Python raised. */
static void ask_python(const char *operator_name, word *stack, struct pending *mine,
		       uint32_t n_results)
{
	struct pending *before = pending;
	int r;

	pending = mine;
	(void)__atomic_add_fetch(&slot.counts.asked, 1, __ATOMIC_RELAXED);
	r = torch.call(operator_name, "", stack, TORCH_BUILD);
	pending = before;
	if (r != 0)
		slot_failure_throw("fmha: torch could not call its function of Python's");
	if (!mine->raises)
		return;
	for (uint32_t i = 0; i < n_results; i++)
		(void)torch.delete_tensor(as_tensor(stack[i]));
	slot_exception_throw(&mine->exception);
}

/* ---- aten::_scaled_dot_product_flash_attention ---- */

enum { QUERY, KEY, VALUE, DROPOUT_P, IS_CAUSAL, DEBUG_MASK, SCALE };
enum { OUT, LOGSUMEXP, CUM_Q, CUM_K, MAX_Q, MAX_K, STATE, UNUSED, MASK };

static bool is_zero(word number)
{
	double value;

	memcpy(&value, &number, sizeof(value));
	return value == 0;
}

static int64_t rows_of(tensor t)
{
	int64_t dim = 0, *sizes = NULL;

	return torch.dim(t, &dim) == 0 && dim == 4 && torch.sizes(t, &sizes) == 0 ? sizes[2] : 0;
}

/* Python's operator has the results that are tensors: torch does not find its way among others. */
static void forward_by_python(word *stack, const struct call *call)
{
	static const uint32_t roles[] = {FMHA_T_O, FMHA_T_LSE};
	const int64_t rows_q = rows_of(as_tensor(stack[QUERY])),
		      rows_k = rows_of(as_tensor(stack[KEY]));
	struct pending mine = {.call = call};

	ask_python(slot.options.forward, stack, &mine, MASK - 1);
	memmove(&stack[STATE], &stack[MAX_Q], 3 * sizeof(*stack));
	stack[MAX_Q] = (word)rows_q;
	stack[MAX_K] = (word)rows_k;
	if (mine.learned)
		remember(&mine, roles, &stack[OUT], 2, &stack[STATE], 3);
}

static void forward(word *stack, uint64_t n_arguments, uint64_t n_results)
{
	struct call call = {0};
	tensor made[MOST_MADE] = {NULL}, constants[3] = {NULL};
	bool good = is_zero(stack[DROPOUT_P]) && !(stack[DEBUG_MASK] & 0xff);

	(void)n_arguments;
	(void)n_results;
	call_put(&call, 0);
	good = good && call_describe(&call, FMHA_T_Q, as_tensor(stack[QUERY])) &&
	       call_describe(&call, FMHA_T_K, as_tensor(stack[KEY])) &&
	       call_describe(&call, FMHA_T_V, as_tensor(stack[VALUE]));
	describe_words(&call, stack[IS_CAUSAL], stack[SCALE], false);
	good = good && call.row.words[1] == 4 && is_here(&call);
	if (good && launch(&call, made, constants)) {
		const int64_t rows_q = call.row.words[6], rows_k = call.row.words[16];
		tensor none[2] = {NULL, NULL};

		for (int i = QUERY; i <= VALUE; i++)
			(void)torch.delete_tensor(as_tensor(stack[i]));
		if (stack[SCALE])
			slot_word_free((word *)(uintptr_t)stack[SCALE]); // NOLINT: torch's
		(void)torch.new_undefined(&none[0]);
		(void)torch.new_undefined(&none[1]);
		stack[OUT] = as_word(made[0]);
		stack[LOGSUMEXP] = as_word(made[1]);
		stack[CUM_Q] = as_word(none[0]);
		stack[CUM_K] = as_word(none[1]);
		stack[MAX_Q] = (word)rows_q;
		stack[MAX_K] = (word)rows_k;
		for (int i = 0; i < 3; i++)
			stack[STATE + i] = as_word(constants[i]);
		(void)__atomic_add_fetch(&slot.counts.forward, 1, __ATOMIC_RELAXED);
		return;
	}
	forward_by_python(stack, good ? &call : NULL);
}

/* ---- its gradient ---- */

enum {
	B_GRAD,
	B_QUERY,
	B_KEY,
	B_VALUE,
	B_OUT,
	B_LOGSUMEXP,
	B_CUM_Q,
	B_CUM_K,
	B_MAX_Q,
	B_MAX_K,
	B_DROPOUT_P,
	B_IS_CAUSAL,
	B_SEED,
	B_OFFSET,
	B_SCALE
};

static void backward(word *stack, uint64_t n_arguments, uint64_t n_results)
{
	static const uint32_t given[] = {FMHA_T_DO, FMHA_T_Q, FMHA_T_K,
					 FMHA_T_V,  FMHA_T_O, FMHA_T_LSE};
	static const uint32_t roles[] = {FMHA_T_DQ, FMHA_T_DK, FMHA_T_DV};
	static const uint8_t unread[] = {B_CUM_Q, B_CUM_K, B_SEED, B_OFFSET};
	struct call call = {0};
	struct pending mine = {0};
	tensor made[MOST_MADE] = {NULL}, constants[1] = {NULL};
	bool good = is_zero(stack[B_DROPOUT_P]);

	(void)n_arguments;
	(void)n_results;
	call_put(&call, 1);
	for (uint32_t i = 0; good && i < LENGTH(given); i++)
		good = call_describe(&call, given[i], as_tensor(stack[B_GRAD + i]));
	describe_words(&call, stack[B_IS_CAUSAL], stack[B_SCALE],
		       torch.is_deterministic(torch.context()));
	/* A gradient whose elements do not lie one by one is written out first, by Python. */
	good = good && call.row.words[1] == 4 && call.row.words[9] == 1 && is_here(&call);
	if (good && launch(&call, made, constants)) {
		for (int i = B_GRAD; i <= B_LOGSUMEXP; i++)
			(void)torch.delete_tensor(as_tensor(stack[i]));
		for (uint32_t i = 0; i < LENGTH(unread); i++)
			(void)torch.delete_tensor(as_tensor(stack[unread[i]]));
		if (stack[B_SCALE])
			slot_word_free((word *)(uintptr_t)stack[B_SCALE]); // NOLINT: torch's
		for (uint32_t i = 0; i < LENGTH(roles); i++)
			stack[i] = as_word(made[i]);
		(void)__atomic_add_fetch(&slot.counts.backward, 1, __ATOMIC_RELAXED);
		return;
	}
	mine.call = good ? &call : NULL;
	ask_python(slot.options.backward, stack, &mine, 3);
	if (mine.learned)
		remember(&mine, roles, stack, 3, NULL, 0);
}

/* ---- for Python ---- */

const char *fmha_slot_open(const struct fmha_slot_options *options)
{
	static char sentence[160];
	const char *missing;

	if (slot.library)
		return "it is open already";
	slot.options = *options;
	slot.on_host = strcmp(options->key, "CPU") == 0;
	missing = find_torch(slot.on_host);
	if (!missing && !slot_python_find())
		missing = "Py_IncRef";
	if (missing) {
		(void)snprintf(sentence, sizeof(sentence), "this process has no %s", missing);
		return sentence;
	}
	if (torch.library_new("aten", options->key, "fmhad", 0, &slot.library) != 0 ||
	    torch.library_impl(slot.library, "_scaled_dot_product_flash_attention", forward,
			       TORCH_BUILD) != 0 ||
	    torch.library_impl(slot.library, "_scaled_dot_product_flash_attention_backward",
			       backward, TORCH_BUILD) != 0) {
		fmha_slot_close();
		return "torch refused the functions";
	}
	return NULL;
}

void fmha_slot_close(void)
{
	if (slot.library)
		(void)torch.library_delete(slot.library);
	slot.library = NULL;
}

int fmha_slot_learn(struct fmha_local_plan *plan, uint64_t workspace_bytes,
		    const struct fmha_local_keys *keys, uint8_t *captured)
{
	if (!pending || !pending->call)
		return 0;
	pending->found = (struct problem){.plan = plan,
					  .workspace_bytes = workspace_bytes,
					  .has_keys = keys != NULL,
					  .captured = captured};
	if (keys)
		pending->found.keys = *keys;
	(void)pthread_rwlock_rdlock(&slot.lock);
	pending->generation = slot.generation;
	(void)pthread_rwlock_unlock(&slot.lock);
	pending->learned = true;
	return 1;
}

void fmha_slot_forget(void)
{
	(void)pthread_rwlock_wrlock(&slot.lock);
	slot.generation++;
	for (size_t i = 0; i < N_BUCKETS; i++) {
		while (slot.buckets[i]) {
			struct problem *problem = slot.buckets[i];

			slot.buckets[i] = problem->next;
			problem_free(problem);
		}
	}
	__atomic_store_n(&slot.counts.known, 0, __ATOMIC_RELAXED);
	(void)pthread_rwlock_unlock(&slot.lock);
}

void fmha_slot_raise(uintptr_t type, uintptr_t value, uintptr_t traceback)
{
	if (!pending || pending->raises)
		return;
	slot_exception_take(&pending->exception, type, value, traceback);
	pending->raises = true;
}

void fmha_slot_count(struct fmha_slot_counts *ret_counts)
{
	ret_counts->forward = __atomic_load_n(&slot.counts.forward, __ATOMIC_RELAXED);
	ret_counts->backward = __atomic_load_n(&slot.counts.backward, __ATOMIC_RELAXED);
	ret_counts->asked = __atomic_load_n(&slot.counts.asked, __ATOMIC_RELAXED);
	ret_counts->known = __atomic_load_n(&slot.counts.known, __ATOMIC_RELAXED);
}
