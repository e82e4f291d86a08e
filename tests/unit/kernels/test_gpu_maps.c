/* SPDX-License-Identifier: MIT */
/* Tensor maps: what the copy engine is told, and what it cannot follow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <kernels/gpu_kernel.h>

enum { BATCH = 2, ROWS_Q = 70, ROWS_K = 300, HEADS_Q = 6, HEADS_K = 3, HDIM_Q = 192, HDIM_V = 128 };
enum { Q, K, V, BIAS };

static const struct gpu_kernel kernel = {.tile = {.pipeline = GPU_WGMMA,
						  .tile_m = 128,
						  .tile_n = 112,
						  .hdim_q = HDIM_Q,
						  .hdim_v = HDIM_V,
						  .waves_m = 8,
						  .waves_n = 1}};
static _Alignas(16) uint16_t memory[64];

/* (batch, seq, head, dim) without gaps. */
static struct abi_tensor tensor(int64_t rows, int64_t heads, int64_t hdim)
{
	return (struct abi_tensor){memory, rows * heads * hdim, heads * hdim, hdim, 1};
}

static struct abi_fwd_args problem(void)
{
	return (struct abi_fwd_args){
		.q = tensor(ROWS_Q, HEADS_Q, HDIM_Q),
		.k = tensor(ROWS_K, HEADS_K, HDIM_Q),
		.v = tensor(ROWS_K, HEADS_K, HDIM_V),
		.o = tensor(ROWS_Q, HEADS_Q, HDIM_V),
		.sequences = {.batch = BATCH, .seqlen_q_max = ROWS_Q, .seqlen_k_max = ROWS_K},
		.nhead_q = HEADS_Q,
		.nhead_k = HEADS_K,
		.hdim_q = HDIM_Q,
		.hdim_v = HDIM_V,
		.dtype = ABI_BF16,
		.o_dtype = ABI_BF16};
}

static void axes_are_dim_sequence_head_batch(void **state)
{
	const uint64_t extents[] = {HDIM_V, ROWS_K, HEADS_K, BATCH};
	const uint64_t strides[] = {2 * HEADS_K * HDIM_V, 2 * HDIM_V,
				    2 * ROWS_K * HEADS_K * HDIM_V};
	const uint32_t box[] = {64, 112, 1, 1};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	assert_null(gpu_kernel_maps(&kernel, &a, &record));
	assert_int_equal(record.n_maps, 3);
	assert_int_equal(record.maps[V].offset, offsetof(struct abi_fwd_args, v.data));
	assert_memory_equal(record.maps[V].extents, extents, sizeof(extents));
	assert_memory_equal(record.maps[V].strides, strides, sizeof(strides));
	assert_memory_equal(record.maps[V].box, box, sizeof(box));
	assert_int_equal(record.maps[V].swizzle, 128);
	assert_int_equal(record.maps[Q].extents[1], ROWS_Q);
	assert_int_equal(record.maps[Q].extents[2], HEADS_Q);
	assert_int_equal(record.maps[Q].box[1], 128);
	assert_int_equal(record.n_aligned, 4);
	assert_int_equal(record.aligned[3], offsetof(struct abi_fwd_args, o.data));
}

/* A kernel of splits has rows of all heads that share keys in a tile, where that leaves fewer; its parts go to
 * the workspace, O's type and place are nobody's business then. */
static void splits_have_rows_of_several_heads(void **state)
{
	const uint64_t extents[] = {HDIM_Q, HEADS_Q, 40, BATCH};
	const uint64_t strides[] = {2 * HDIM_Q, 2 * HEADS_Q * HDIM_Q,
				    2 * ROWS_Q * HEADS_Q * HDIM_Q};
	const uint32_t together[] = {64, 2, 64, 1}, alone[] = {64, 1, 128, 1};
	static float parts[1];
	static const float factor = 1;
	struct gpu_kernel splits = kernel;
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	splits.family = ABI_FWD_SPLITKV;
	a.sequences.seqlen_q_max = 40;
	assert_null(gpu_kernel_maps(&splits, &a, &record));
	assert_memory_equal(record.maps[Q].extents, extents, sizeof(extents));
	assert_memory_equal(record.maps[Q].strides, strides, sizeof(strides));
	assert_memory_equal(record.maps[Q].box, together, sizeof(together));
	a.q_descale.data = &factor;
	assert_null(gpu_kernel_maps(&splits, &a, &record));
	assert_memory_equal(record.maps[Q].box, alone, sizeof(alone));
	a.q_descale.data = NULL;
	a.sequences.seqlen_q_max = 128; /* a tile a head, or two of both */
	assert_null(gpu_kernel_maps(&splits, &a, &record));
	assert_memory_equal(record.maps[Q].box, alone, sizeof(alone));
	a.o_dtype = ABI_F32;
	assert_string_equal(gpu_kernel_maps(&splits, &a, &record), "O has not the type of Q");
	a.o_acc = parts;
	assert_null(gpu_kernel_maps(&splits, &a, &record));
}

/* A longer or shorter cache in a record that was made for this one: the maps that its own plan has. */
static void a_cache_that_grows_has_other_maps(void **state)
{
	static const int32_t batches[] = {BATCH, 1};

	(void)state;
	for (int32_t rows = ROWS_K - 30; rows < ROWS_K + 90; rows += 17)
		for (int n = 0; n < 2; n++) {
			const struct launch_keys keys = {
				.seqlen_k = rows,
				.k_stride = {(int64_t)rows * HEADS_K * HDIM_Q, HDIM_Q},
				.v_stride = {(int64_t)rows * HEADS_K * HDIM_V, HDIM_V}};
			struct launch_record record = {
				.sequences_offset = offsetof(struct abi_fwd_args, sequences),
				.k_offset = offsetof(struct abi_fwd_args, k),
				.v_offset = offsetof(struct abi_fwd_args, v)};
			struct launch_record want = {0};
			union abi_args args = {.fwd = problem()};

			args.fwd.sequences.batch = batches[n];
			assert_null(gpu_kernel_maps(&kernel, &args.fwd, &record));
			launch_set_keys(&record, &keys, &args);
			assert_int_equal(args.fwd.sequences.seqlen_k_max, rows);
			assert_int_equal(args.fwd.sequences.total_k, rows * batches[n]);
			assert_null(gpu_kernel_maps(&kernel, &args.fwd, &want));
			for (uint32_t i = 0; i < record.n_maps; i++)
				launch_set_map_keys(&record, &args, &record.maps[i]);
			assert_int_equal(record.n_maps, want.n_maps);
			assert_memory_equal(record.maps, want.maps,
					    want.n_maps * sizeof(want.maps[0]));
		}
}

static void other_loops_take_no_maps(void **state)
{
	const struct gpu_kernel other = {.tile = {.pipeline = GPU_MMA}};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.k.data = memory + 1;
	assert_null(gpu_kernel_maps(&other, &a, &record));
	assert_int_equal(record.n_maps, 0);
	assert_int_equal(record.n_aligned, 0);
}

static void packed_sequences_are_one_axis(void **state)
{
	static const abi_i32 starts[] = {0, 30, ROWS_K};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.sequences.seqstart_k = starts;
	assert_non_null(gpu_kernel_maps(&kernel, &a, &record)); /* how long is it? */
	a.sequences.total_k = ROWS_K;
	a.k.stride_batch = 1; /* means nothing */
	assert_null(gpu_kernel_maps(&kernel, &a, &record));
	assert_int_equal(record.maps[K].extents[1], ROWS_K);
	assert_int_equal(record.maps[K].extents[3], 1);
	assert_int_equal(record.maps[K].strides[2] % 16, 0);
}

static void an_indexed_cache_has_its_own_rows(void **state)
{
	static const abi_i32 rows[] = {4, 0};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.cache.cache_batch_idx = rows;
	a.cache.cache_batch = 5;
	assert_null(gpu_kernel_maps(&kernel, &a, &record));
	assert_int_equal(record.maps[K].extents[3], 5);
	assert_int_equal(record.maps[Q].extents[3], BATCH);
}

/* (batch, head, row, column), rows of more elements than there are columns. */
static void add_bias(struct abi_fwd_args *a)
{
	const int64_t row = 304;

	a->bias = (struct abi_tensor){memory, HEADS_Q * ROWS_Q * row, row, ROWS_Q * row, 1};
	a->bias_dtype = ABI_BF16;
}

static void a_bias_is_a_map_by_rows_and_keys(void **state)
{
	const uint64_t extents[] = {ROWS_K, ROWS_Q, HEADS_Q, BATCH};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	add_bias(&a);
	assert_null(gpu_kernel_maps(&kernel, &a, &record));
	assert_int_equal(record.n_maps, 4);
	assert_int_equal(record.n_aligned, 5);
	assert_int_equal(record.maps[BIAS].offset, offsetof(struct abi_fwd_args, bias.data));
	assert_memory_equal(record.maps[BIAS].extents, extents, sizeof(extents));
	assert_int_equal(record.maps[BIAS].strides[0], 2 * 304);
	assert_int_equal(record.maps[BIAS].box[0], 64);
	assert_int_equal(record.maps[BIAS].box[1], 128);
}

/* What repeats is one element of the axis, and a row is brought once. */
static void a_bias_may_repeat(void **state)
{
	const uint64_t extents[] = {ROWS_K, 1, 1, 1};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	add_bias(&a);
	a.bias.stride_batch = a.bias.stride_head = a.bias.stride_seq = 0;
	assert_null(gpu_kernel_maps(&kernel, &a, &record));
	assert_memory_equal(record.maps[BIAS].extents, extents, sizeof(extents));
	assert_int_equal(record.maps[BIAS].box[1], 1);
}

static void eight_bits_fill_boxes_of_128_columns(void **state)
{
	static const float factor = 1;
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.dtype = ABI_E4M3;
	a.q_descale = a.k_descale = a.v_descale = (struct abi_descale){.data = &factor};
	for (int o = ABI_F32; o <= ABI_BF16; o++) {
		a.o_dtype = o;
		assert_null(gpu_kernel_maps(&kernel, &a, &record));
	}
	assert_int_equal(record.maps[K].dtype, ABI_E4M3);
	assert_int_equal(record.maps[K].box[0], 128);
	assert_int_equal(record.maps[K].strides[0], HEADS_K * HDIM_Q);
}

/* Under queries of 16 bits: boxes go by each tensor's own type, O by the queries'. */
static void narrow_keys_have_boxes_of_their_own(void **state)
{
	static const int32_t types[] = {ABI_E4M3, ABI_E5M2, ABI_I8};

	(void)state;
	for (int i = 0; i < 3; i++) {
		struct abi_fwd_args a = problem();
		struct launch_record record;

		a.kv_dtype = types[i];
		assert_null(gpu_kernel_maps(&kernel, &a, &record));
		assert_int_equal(record.maps[Q].dtype, ABI_BF16);
		assert_int_equal(record.maps[Q].box[0], 64);
		assert_int_equal(record.maps[K].dtype, types[i]);
		assert_int_equal(record.maps[K].box[0], 128);
		assert_int_equal(record.maps[K].strides[0], HEADS_K * HDIM_Q);
		assert_int_equal(record.maps[V].box[0], 128);
		a.o_dtype = ABI_F16;
		assert_string_equal(gpu_kernel_maps(&kernel, &a, &record),
				    "O has not the type of Q");
	}
}

/* Decode's loop takes one scale a head of such keys, as of queries of 8 bits. */
static void decode_refuses_several_scales_of_a_head(void **state)
{
	static const struct gpu_kernel decode = {
		.family = ABI_FWD_SPLITKV, .dtype = ABI_BF16, .tile = {.pipeline = GPU_DECODE}};
	static const float factors[4] = {1, 1, 1, 1};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.kv_dtype = ABI_E4M3;
	a.k_descale = (struct abi_descale){.data = factors};
	assert_null(gpu_kernel_maps(&decode, &a, &record));
	a.k_descale.block = 16;
	assert_string_equal(gpu_kernel_maps(&decode, &a, &record),
			    "keys of a head have several scales");
}

static void what_the_engine_cannot_follow_is_refused(void **state)
{
	static const float factor = 1;
	struct launch_record record;

	(void)state;
	for (int fault = 0; fault < 15; fault++) {
		struct abi_fwd_args a = problem();

		add_bias(&a);
		switch (fault) {
		case 0:
			a.k.data = memory + 1;
			break;
		case 1:
			a.k.stride_seq += 4;
			break;
		case 2:
			a.k.stride_head = 0;
			break;
		case 3:
			a.v.stride_dim = 2;
			break;
		case 4:
			a.sequences.seqlen_k_max = 0;
			break;
		case 5:
			a.cache.page_size = 16;
			break;
		case 6:
			a.o_dtype = ABI_F32;
			break;
		case 7:
			a.o.data = memory + 4;
			break;
		case 8:
			a.o.stride_seq += 4;
			break;
		case 9:
			a.hdim_v = 100;
			break;
		case 10:
			a.bias_dtype = ABI_F32;
			break;
		case 11:
			a.bias.stride_seq = ROWS_K;
			break;
		case 12:
			a.logits_soft_cap = 1025;
			break;
		case 13:
			a.k_descale = (struct abi_descale){.data = &factor, .block = 64};
			break;
		default:
			a.v_descale = (struct abi_descale){.data = &factor, .per_page = 1};
		}
		assert_non_null(gpu_kernel_maps(&kernel, &a, &record));
	}
}

/* Boxes divide a tile and a page; the axis of batches is that of pages. */
static void pages_come_in_boxes_that_tiles_have_in_common(void **state)
{
	static const int32_t sizes[] = {8, 16, 64, 48, 112, 224, 256};
	static const uint32_t boxes[] = {8, 16, 16, 16, 112, 112, 16}; /* of tiles of 112 keys */
	static const abi_i32 padding[BATCH];
	struct gpu_kernel paged = kernel;
	struct launch_record record;

	(void)state;
	for (int family = ABI_FWD_PAGEDKV; family <= ABI_BATCH_PREFILL;
	     family += ABI_BATCH_PREFILL - ABI_FWD_PAGEDKV) {
		struct abi_fwd_args a = problem();

		paged.family = (enum abi_family)family;
		a.cache.n_pages = 9;
		for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
			const uint64_t extents[] = {HDIM_V, (uint64_t)sizes[i], HEADS_K, 9};

			a.cache.page_size = sizes[i];
			assert_null(gpu_kernel_maps(&paged, &a, &record));
			assert_memory_equal(record.maps[V].extents, extents, sizeof(extents));
			assert_int_equal(record.maps[K].box[1], boxes[i]);
			assert_int_equal(record.maps[V].box[1], boxes[i]);
			assert_int_equal(record.maps[Q].box[1], 128);
		}
		a.sequences.leftpad_k = padding;
		assert_non_null(gpu_kernel_maps(&paged, &a, &record));
		a.sequences.leftpad_k = NULL;
		a.cache.layout = ABI_KV_VECTORIZED;
		assert_non_null(gpu_kernel_maps(&paged, &a, &record));
		a.cache.layout = 0;
		a.cache.page_size = 20; /* rows are swizzled by eight */
		assert_non_null(gpu_kernel_maps(&paged, &a, &record));
		a.cache.page_size = 0;
		assert_non_null(gpu_kernel_maps(&paged, &a, &record));
	}
}

/* A tile of keys holds its values; Q and O are moved by chunks of 16 bytes. */
static void latents_have_one_map(void **state)
{
	static const struct gpu_tile tile = {GPU_LATENT, 64, 64, 576, 512, 4, 2, 1};
	static const int32_t sizes[] = {8, 16, 64, 256, 48};
	static const uint32_t boxes[] = {8, 16, 64, 64, 16};
	struct gpu_kernel latent = {.family = ABI_FWD_PAGEDKV, .tile = tile};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.nhead_k = 1, a.hdim_q = 576, a.hdim_v = 512, a.v_in_k = 1;
	a.q = tensor(ROWS_Q, HEADS_Q, 576);
	a.k = a.v = tensor(ROWS_K, 1, 576);
	a.o = tensor(ROWS_Q, HEADS_Q, 512);
	a.cache.n_pages = 9;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		const uint64_t extents[] = {576, (uint64_t)sizes[i], 1, 9};

		a.cache.page_size = sizes[i];
		assert_null(gpu_kernel_maps(&latent, &a, &record));
		assert_int_equal(record.n_maps, 1);
		assert_int_equal(record.maps[0].offset, offsetof(struct abi_fwd_args, k.data));
		assert_memory_equal(record.maps[0].extents, extents, sizeof(extents));
		assert_int_equal(record.maps[0].box[0], 64);
		assert_int_equal(record.maps[0].box[1], boxes[i]);
		assert_int_equal(record.n_aligned, 3);
	}
	latent.family = ABI_FWD_SPLITKV; /* in pages, and without */
	assert_null(gpu_kernel_maps(&latent, &a, &record));
	a.cache.page_size = 0;
	assert_null(gpu_kernel_maps(&latent, &a, &record));
	assert_int_equal(record.maps[0].extents[1], ROWS_K);
	assert_int_equal(record.maps[0].box[1], 64);
	latent.family = ABI_FWD_PAGEDKV;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.cache.page_size = 1;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.chosen.n = 100; /* rows that chunks are copied of: no box, and any page */
	assert_null(gpu_kernel_maps(&latent, &a, &record));
	assert_int_equal(record.n_maps, 0);
	assert_int_equal(record.n_aligned, 3);
	a.chosen.n = 0;
	a.cache.page_size = 64;
	a.q.data = memory + 4;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.q.data = memory;
	a.o.stride_head += 4;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.o.stride_head -= 4;
	a.o_dtype = ABI_F32;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.o_dtype = ABI_BF16;
	a.v_in_k = 0;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
}

/* They come through registers, in pages of any size; their places are counted by words. */
static void latents_of_fp8_have_no_map(void **state)
{
	static const struct gpu_tile tile = {GPU_LATENT, 64, 64, 576, 512, 4, 2, 1};
	struct gpu_kernel latent = {.family = ABI_FWD_PAGEDKV, .tile = tile};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.nhead_k = 1, a.hdim_q = 576, a.hdim_v = 512, a.v_in_k = 1;
	a.kv_dtype = ABI_E4M3, a.cache.layout = ABI_KV_LATENT_FP8;
	a.q = tensor(ROWS_Q, HEADS_Q, 576);
	a.k = a.v = tensor(ROWS_K, 1, ABI_LATENT_BYTES);
	a.o = tensor(ROWS_Q, HEADS_Q, 512);
	a.cache.n_pages = 9;
	for (int32_t size = 1; size < 70; size++) {
		a.cache.page_size = size;
		a.k.stride_batch = (int64_t)size * ABI_LATENT_BYTES;
		assert_null(gpu_kernel_maps(&latent, &a, &record));
		assert_int_equal(record.n_maps, 0);
		assert_int_equal(record.n_aligned, 3);
	}
	a.k.data = memory + 4;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.k.data = memory;
	a.k.stride_seq += 8;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
	a.k.stride_seq -= 8;
	a.cache.n_pages = 1 << 20;
	assert_null(gpu_kernel_maps(&latent, &a, &record));
	a.cache.n_pages = 2 << 20;
	assert_non_null(gpu_kernel_maps(&latent, &a, &record));
}

/* Each block of a cluster brings half of a tile's rows; those of splits have all. Q is no map's. */
static void wide_heads_come_by_halves(void **state)
{
	static const struct gpu_tile tile = {GPU_WIDE, 64, 64, 512, 512, 4, 2, 1};
	static const int32_t sizes[] = {8, 16, 64, 256, 48};
	static const uint32_t boxes[] = {8, 16, 32, 32, 16}, of_splits[] = {8, 16, 64, 64, 16};
	struct gpu_kernel wide = {.family = ABI_FWD_PAGEDKV, .tile = tile},
			  split = {.family = ABI_FWD_SPLITKV, .tile = tile};
	struct abi_fwd_args a = problem();
	struct launch_record record;

	(void)state;
	a.hdim_q = 512, a.hdim_v = 480;
	a.q = tensor(ROWS_Q, HEADS_Q, 512);
	a.k = tensor(ROWS_K, HEADS_K, 512);
	a.v = tensor(ROWS_K, HEADS_K, 480);
	a.o = tensor(ROWS_Q, HEADS_Q, 480);
	a.cache.n_pages = 9;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		const uint64_t extents[] = {480, (uint64_t)sizes[i], HEADS_K, 9};

		a.cache.page_size = sizes[i];
		assert_null(gpu_kernel_maps(&split, &a, &record));
		assert_int_equal(record.maps[0].box[1], of_splits[i]);
		assert_null(gpu_kernel_maps(&wide, &a, &record));
		assert_int_equal(record.n_maps, 2);
		assert_int_equal(record.maps[0].offset, offsetof(struct abi_fwd_args, k.data));
		assert_int_equal(record.maps[1].offset, offsetof(struct abi_fwd_args, v.data));
		assert_int_equal(record.maps[0].extents[0], 512);
		assert_memory_equal(record.maps[1].extents, extents, sizeof(extents));
		assert_int_equal(record.maps[0].box[1], boxes[i]);
		assert_int_equal(record.maps[1].box[1], boxes[i]);
		assert_int_equal(record.n_aligned, 4);
	}
	a.cache.page_size = 12;
	assert_non_null(gpu_kernel_maps(&wide, &a, &record));
	a.cache.page_size = 0;
	assert_non_null(gpu_kernel_maps(&wide, &a, &record));
	wide.family = ABI_FWD;
	assert_null(gpu_kernel_maps(&wide, &a, &record));
	assert_int_equal(record.maps[0].box[1], 32);
	a.q.data = memory + 4;
	assert_non_null(gpu_kernel_maps(&wide, &a, &record));
	a.q.data = memory;
	a.v.stride_seq += 4;
	assert_non_null(gpu_kernel_maps(&wide, &a, &record));
	a.v.stride_seq -= 4;
	a.o_dtype = ABI_F32;
	assert_non_null(gpu_kernel_maps(&wide, &a, &record));
}

static struct abi_bwd_args gradients(void)
{
	return (struct abi_bwd_args){
		.q = tensor(ROWS_Q, HEADS_Q, HDIM_Q),
		.k = tensor(ROWS_K, HEADS_K, HDIM_Q),
		.v = tensor(ROWS_K, HEADS_K, HDIM_V),
		.d_o = tensor(ROWS_Q, HEADS_Q, HDIM_V),
		.dk = tensor(ROWS_K, HEADS_K, HDIM_Q),
		.dv = tensor(ROWS_K, HEADS_K, HDIM_V),
		.sequences = {.batch = BATCH, .seqlen_q_max = ROWS_Q, .seqlen_k_max = ROWS_K},
		.nhead_q = HEADS_Q,
		.nhead_k = HEADS_K,
		.hdim_q = HDIM_Q,
		.hdim_v = HDIM_V,
		.dtype = ABI_BF16};
}

static void backward_streams_queries(void **state)
{
	struct gpu_kernel backward = kernel;
	struct abi_bwd_args a = gradients();
	struct launch_record record;

	(void)state;
	backward.family = ABI_BWD_DQ_DK_DV;
	backward.tile.tile_m = backward.tile.tile_n = 64;
	assert_null(gpu_kernel_maps(&backward, &a, &record));
	assert_int_equal(record.n_maps, 4);
	assert_int_equal(record.maps[3].offset, offsetof(struct abi_bwd_args, d_o.data));
	assert_int_equal(record.maps[3].extents[0], HDIM_V);
	assert_int_equal(record.maps[3].extents[1], ROWS_Q);
	assert_int_equal(record.maps[3].box[1], 64);
	assert_int_equal(record.maps[K].extents[2], HEADS_K);
	assert_int_equal(record.n_aligned, 6);
	assert_int_equal(record.aligned[5], offsetof(struct abi_bwd_args, dv.data));
	a.dv.data = memory + 4;
	assert_non_null(gpu_kernel_maps(&backward, &a, &record));
	a = gradients();
	a.dk.stride_seq += 4;
	assert_non_null(gpu_kernel_maps(&backward, &a, &record));
	a = gradients();
	a.dbias.data = memory;
	assert_non_null(gpu_kernel_maps(&backward, &a, &record));
}

/* Rows of 96, or of whole slabs where a soft cap or dropout keeps dQ in chunks. */
static void sums_of_dq_lie_as_the_loop_has_them(void **state)
{
	static float sums;
	struct gpu_kernel backward = kernel;
	struct abi_bwd_args a = gradients();
	struct launch_record record;

	(void)state;
	backward.family = ABI_BWD_DQ_DK_DV;
	backward.tile.tile_m = backward.tile.tile_n = 64;
	backward.tile.hdim_q = 96;
	a.dq_acc = &sums;
	a.dq_tile_rows = 64;
	for (int is_long = 0; is_long < 2; is_long++) {
		a.dropout.p_drop = is_long ? 0.1f : 0;
		a.dq_tile_floats = 64 * (is_long ? 128 : 96) + 64;
		assert_null(gpu_kernel_maps(&backward, &a, &record));
		a.dq_tile_floats = 64 * (is_long ? 96 : 128) + 64;
		assert_non_null(gpu_kernel_maps(&backward, &a, &record));
	}
	a.dq_tile_floats = 64 * 128 + 64;
	a.dq_tile_rows = 32;
	assert_non_null(gpu_kernel_maps(&backward, &a, &record));
}

static void descriptors_want_dense_aligned_rows(void **state)
{
	struct gpu_kernel amd = kernel;
	struct launch_record record;

	(void)state;
	amd.tile.pipeline = GPU_AMD;
	for (int fault = 0; fault < 8; fault++) {
		struct abi_fwd_args a = problem();

		a.o_dtype = ABI_F32; /* any O will do */
		a.o.data = memory + 1;
		assert_null(gpu_kernel_maps(&amd, &a, &record));
		assert_int_equal(record.n_maps, 0);
		assert_int_equal(record.n_aligned, 3);
		assert_int_equal(record.aligned[1], offsetof(struct abi_fwd_args, k.data));
		switch (fault) {
		case 0:
			a.q.data = memory + 1;
			break;
		case 1:
			a.k.stride_seq += 4;
			break;
		case 2:
			a.k.stride_seq = HDIM_Q - 8;
			break;
		case 3:
			a.v.stride_dim = 2;
			break;
		case 4:
			a.v.stride_head = 0;
			break;
		case 5:
			a.cache.page_size = 48;
			break;
		case 6:
			a.q.stride_batch += 1;
			break;
		default:
			a.k.stride_seq = INT32_MAX / 112 / 16 * 8 + 8;
		}
		assert_non_null(gpu_kernel_maps(&amd, &a, &record));
	}
}

static void forward_takes_a_bias_that_is_near(void **state)
{
	struct gpu_kernel amd = kernel;
	struct launch_record record;

	(void)state;
	amd.tile.pipeline = GPU_AMD;
	for (int fault = 0; fault < 6; fault++) {
		struct abi_fwd_args a = problem();
		abi_i64 *const strides[] = {&a.bias.stride_seq, &a.bias.stride_dim,
					    &a.bias.stride_head};

		add_bias(&a);
		a.bias_dtype = ABI_F32;
		*strides[fault / 2] = fault % 2 ? 1 << 22 : 1 << 21;
		assert_int_equal(gpu_kernel_maps(&amd, &a, &record) == NULL,
				 fault % 2 == 0 || fault == 5);
	}
}

/* Q's rows are operands: a chunk that begins in one must not end in another. */
static void descriptors_of_8_bits_want_whole_chunks(void **state)
{
	static const float factor = 1;
	struct gpu_kernel amd = kernel;
	struct launch_record record;

	(void)state;
	amd.tile.pipeline = GPU_AMD;
	for (int fault = 0; fault < 3; fault++) {
		struct abi_fwd_args a = problem();

		a.dtype = ABI_E4M3;
		a.q_descale = a.k_descale = a.v_descale = (struct abi_descale){.data = &factor};
		assert_null(gpu_kernel_maps(&amd, &a, &record));
		if (fault == 0)
			a.hdim_q -= 8;
		else if (fault == 1)
			a.k_descale.block = 64;
		else
			a.v_descale.per_page = 1;
		assert_non_null(gpu_kernel_maps(&amd, &a, &record));
	}
}

static void decode_takes_pages_of_whole_runs(void **state)
{
	static const int32_t lengths[] = {0};
	struct gpu_kernel decode = kernel;
	struct launch_record record;

	(void)state;
	decode.tile.pipeline = GPU_AMD_DECODE;
	for (int fault = -1; fault < 5; fault++) {
		struct abi_fwd_args a = problem();

		a.cache.page_size = 48;
		a.cache.n_pages = 7;
		a.sequences.leftpad_k = lengths;
		a.hdim_q -= 8;
		a.hdim_v -= 40;
		switch (fault) {
		case 0:
			a.cache.page_size = 40;
			break;
		case 1:
			a.bias.data = memory;
			break;
		case 2:
			a.cache.layout = ABI_KV_VECTORIZED;
			break;
		case 3:
			a.hdim_q -= 32;
			break;
		case 4:
			a.v.stride_batch += 4;
			break;
		default:
			break;
		}
		assert_int_equal(gpu_kernel_maps(&decode, &a, &record) == NULL, fault < 0);
		a.cache.page_size = 0;
		a.sequences.batch = 1;
		if (fault != 3)
			assert_null(gpu_kernel_maps(&decode, &a, &record));
	}
}

static const struct gpu_kernel amd_backward = {
	.family = ABI_BWD_DQ_DK_DV, .tile = {.pipeline = GPU_AMD, .tile_m = 32, .tile_n = 128}};

static struct abi_bwd_args backward_problem(void)
{
	const struct abi_fwd_args f = problem();

	return (struct abi_bwd_args){.q = f.q,
				     .k = f.k,
				     .v = f.v,
				     .d_o = f.o,
				     .sequences = f.sequences,
				     .nhead_q = HEADS_Q,
				     .nhead_k = HEADS_K,
				     .hdim_q = HDIM_Q,
				     .hdim_v = HDIM_V,
				     .dtype = ABI_BF16};
}

/* What goes beside rows is found by offsets of 32 bits, LSE by 24: 2^22 elements of 4 bytes are too many, 128 times or once. */
static void backward_offsets_are_near(void **state)
{
	struct launch_record record;

	(void)state;
	for (int fault = 0; fault < 8; fault++) {
		struct abi_bwd_args a = backward_problem();
		abi_i64 *const strides[] = {&a.bias.stride_seq, &a.bias.stride_dim,
					    &a.dbias.stride_seq, &a.lse.stride_seq};

		a.bias.data = a.dbias.data = memory;
		a.bias.stride_seq = a.dbias.stride_seq = 1 << 16;
		a.bias.stride_dim = a.dbias.stride_dim = 1;
		a.bias_dtype = ABI_F32;
		*strides[fault / 2] = fault % 2 ? 1 << 22 : (1 << 21);
		assert_int_equal(gpu_kernel_maps(&amd_backward, &a, &record) == NULL, !(fault % 2));
	}
}

static void backward_asks_the_same_of_all_four(void **state)
{
	struct launch_record record;

	(void)state;
	for (int fault = -1; fault < 4; fault++) {
		struct abi_bwd_args a = backward_problem();
		struct abi_tensor *const tensors[] = {&a.q, &a.d_o, &a.k, &a.v};

		if (fault >= 0)
			tensors[fault]->stride_seq -= 4;
		assert_int_equal(gpu_kernel_maps(&amd_backward, &a, &record) == NULL, fault < 0);
		if (fault >= 0)
			continue;
		assert_int_equal(record.n_aligned, 4);
		assert_int_equal(record.aligned[1], offsetof(struct abi_bwd_args, d_o.data));
		assert_int_equal(record.aligned[3], offsetof(struct abi_bwd_args, v.data));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(axes_are_dim_sequence_head_batch),
		cmocka_unit_test(splits_have_rows_of_several_heads),
		cmocka_unit_test(a_cache_that_grows_has_other_maps),
		cmocka_unit_test(other_loops_take_no_maps),
		cmocka_unit_test(packed_sequences_are_one_axis),
		cmocka_unit_test(an_indexed_cache_has_its_own_rows),
		cmocka_unit_test(a_bias_is_a_map_by_rows_and_keys),
		cmocka_unit_test(a_bias_may_repeat),
		cmocka_unit_test(eight_bits_fill_boxes_of_128_columns),
		cmocka_unit_test(narrow_keys_have_boxes_of_their_own),
		cmocka_unit_test(decode_refuses_several_scales_of_a_head),
		cmocka_unit_test(what_the_engine_cannot_follow_is_refused),
		cmocka_unit_test(pages_come_in_boxes_that_tiles_have_in_common),
		cmocka_unit_test(latents_have_one_map),
		cmocka_unit_test(latents_of_fp8_have_no_map),
		cmocka_unit_test(wide_heads_come_by_halves),
		cmocka_unit_test(backward_streams_queries),
		cmocka_unit_test(sums_of_dq_lie_as_the_loop_has_them),
		cmocka_unit_test(descriptors_want_dense_aligned_rows),
		cmocka_unit_test(descriptors_of_8_bits_want_whole_chunks),
		cmocka_unit_test(decode_takes_pages_of_whole_runs),
		cmocka_unit_test(backward_asks_the_same_of_all_four),
		cmocka_unit_test(backward_offsets_are_near),
		cmocka_unit_test(forward_takes_a_bias_that_is_near),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
