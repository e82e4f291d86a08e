/* SPDX-License-Identifier: MIT */
/*
 * plan_pack.c: plans in a file, for processes that have no daemon. A pack holds what the daemon answered to
 * local_plan, frame by frame, under the very requests, and the code objects that the answers name: a
 * problem is looked for by the bytes of its request.
 *
 *   head, then records: head, payload, zeros up to a multiple of 8
 */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <proto/error.h>
#include <proto/frame.h>
#include <proto/message.h>

#include <proto/cleanup.h>
#include "client.h"

#define PACK_MAGIC "FMHAPLN1"
#define PACK_ALIGN 8

struct pack_head {
	char magic[8];
	uint64_t bytes; /* behind this */
	uint64_t sum;   /* of them: against accidents */
	char backend[FMHA_NAME_BYTES];
};

enum record_kind { RECORD_REQUEST = 1, RECORD_ANSWER, RECORD_CODE /* begins with its hash */ };

struct record_head {
	uint64_t kind, bytes;
};

struct fmha_local_pack {
	uint8_t *data; /* read, not mapped: a file may be cut under a mapping */
	size_t bytes;
};

/* FNV-1a, a word at a time. */
static uint64_t sum_of(uint64_t sum, const void *data, size_t bytes)
{
	const uint8_t *at = data;

	for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
		uint64_t word = 0;

		memcpy(&word, at + i, bytes - i < sizeof(word) ? bytes - i : sizeof(word));
		sum = (sum ^ word) * 1099511628211u;
	}
	return sum;
}

/* ---- reading ---- */

struct record {
	uint64_t kind, bytes;
	const uint8_t *data;
};

/* The record at *@at, which moves behind it. Return: false: there is none, or it is cut off. */
static bool next_record(const struct fmha_local_pack *pack, size_t *at, struct record *ret_record)
{
	struct record_head head;
	size_t left = pack->bytes - *at;

	if (left < sizeof(head))
		return false;
	memcpy(&head, pack->data + *at, sizeof(head));
	left -= sizeof(head);
	if (head.bytes > left || (head.bytes + PACK_ALIGN - 1) / PACK_ALIGN * PACK_ALIGN > left)
		return false;
	*ret_record = (struct record){head.kind, head.bytes, pack->data + *at + sizeof(head)};
	*at += sizeof(head) + (head.bytes + PACK_ALIGN - 1) / PACK_ALIGN * PACK_ALIGN;
	return true;
}

static bool is_whole(const struct fmha_local_pack *pack)
{
	size_t at = sizeof(struct pack_head);
	struct pack_head head;
	struct record record;

	if (pack->bytes < sizeof(head))
		return false;
	memcpy(&head, pack->data, sizeof(head));
	if (memcmp(head.magic, PACK_MAGIC, sizeof(head.magic)) != 0 ||
	    head.bytes != pack->bytes - sizeof(head) ||
	    head.backend[sizeof(head.backend) - 1] != '\0' ||
	    head.sum != sum_of(0, pack->data + sizeof(head), pack->bytes - sizeof(head)))
		return false;
	while (next_record(pack, &at, &record))
		;
	return at == pack->bytes;
}

/* All of the file. Return: 0 or a negative errno; EINVAL: no regular file. */
static int pack_read_file(int fd, struct fmha_local_pack *pack)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return -EINVAL;
	pack->data = malloc(st.st_size > 0 ? (size_t)st.st_size : 1);
	if (!pack->data)
		return -ENOMEM;
	while (pack->bytes < (size_t)st.st_size) {
		ssize_t n = pread(fd, pack->data + pack->bytes, (size_t)st.st_size - pack->bytes,
				  (off_t)pack->bytes);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break; /* cut meanwhile: its sum will tell */
		pack->bytes += (size_t)n;
	}
	return 0;
}

int fmha_local_open_pack(const char *path, struct fmha_local_pack **ret_pack,
			 struct fmha_error *err)
{
	struct fmha_local_pack *pack;
	int fd, r;

	if (!path || !ret_pack)
		return fmha_error_set(err, FMHA_EINVAL, "%s: an argument is NULL", __func__);
	pack = calloc(1, sizeof(*pack));
	if (!pack)
		return fmha_error_set(err, FMHA_ENOMEM, "pack: out of memory");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	r = fd < 0 ? -errno : pack_read_file(fd, pack);
	if (fd >= 0)
		(void)close(fd);
	if (r == 0 && is_whole(pack)) {
		*ret_pack = pack;
		return 0;
	}
	(void)fmha_local_pack_free(pack);
	if (r == -ENOMEM)
		return fmha_error_set(err, FMHA_ENOMEM, "pack: out of memory");
	if (r < 0 && r != -EINVAL)
		return fmha_error_set(err, FMHA_EIO, "%.200s: %s", path, strerror(-r));
	return fmha_error_set(err, FMHA_EINVAL, "%.200s: not a pack of plans, or damaged", path);
}

struct fmha_local_pack *fmha_local_pack_free(struct fmha_local_pack *pack)
{
	if (pack)
		free(pack->data);
	free(pack);
	return NULL;
}

static int fetch_from_pack(void *owner, const uint8_t hash[LAUNCH_HASH_BYTES], void **ret_data,
			   size_t *ret_bytes, struct fmha_error *err)
{
	const struct fmha_local_pack *pack = owner;
	size_t at = sizeof(struct pack_head);
	struct record record;

	while (next_record(pack, &at, &record)) {
		size_t bytes = record.bytes - LAUNCH_HASH_BYTES;

		if (record.kind != RECORD_CODE || record.bytes <= LAUNCH_HASH_BYTES ||
		    memcmp(record.data, hash, LAUNCH_HASH_BYTES) != 0)
			continue;
		*ret_data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
				 -1, 0);
		if (*ret_data == MAP_FAILED)
			return fmha_error_set(err, FMHA_ENOMEM, "code: out of memory");
		memcpy(*ret_data, record.data + LAUNCH_HASH_BYTES, bytes);
		*ret_bytes = bytes;
		return 0;
	}
	return fmha_error_set(err, FMHA_EINVAL, "the pack lacks code that its plans name");
}

/* The answer to the request of those bytes. Return: false: there is none. */
static bool find_answer(const struct fmha_local_pack *pack, const struct proto_buffer *request,
			struct record *ret_answer)
{
	size_t at = sizeof(struct pack_head);
	struct record record;

	while (next_record(pack, &at, &record))
		if (record.kind == RECORD_REQUEST && record.bytes == request->size &&
		    memcmp(record.data, request->data, request->size) == 0)
			return next_record(pack, &at, ret_answer) &&
			       ret_answer->kind == RECORD_ANSWER;
	return false;
}

static int decode_answer(const struct record *answer, struct proto_local_plan_result *ret_result,
			 struct fmha_error *err)
{
	struct proto_message message = {0};
	struct proto_frame frame;
	int r = proto_frame_parse(answer->data, answer->bytes, PROTO_MAX_FRAME, &frame, err);

	if (r != 0 || answer->bytes - frame.header_bytes < frame.payload_bytes)
		return r < 0 ? r : fmha_error_set(err, FMHA_EINVAL, "the pack has half a plan");
	r = proto_message_decode(&message, answer->data + frame.header_bytes, frame.payload_bytes,
				 err);
	if (r == 0)
		r = proto_decode_result(&message, PROTO_LOCAL_PLAN, ret_result, err);
	proto_message_deinit(&message);
	return r;
}

static int plan_from(struct fmha_local_pack *pack, const struct proto_buffer *request,
		     struct fmha_local_plan **ret_plan, struct fmha_error *err)
{
	struct proto_local_plan_result *result;
	struct record answer;
	int r;

	if (!find_answer(pack, request, &answer))
		return fmha_error_set(
			err, FMHA_ENOENT,
			"the pack has no plan for this problem: `fmhactl warm --pack` "
			"writes them where there is a daemon");
	result = malloc(sizeof(*result));
	if (!result)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	r = decode_answer(&answer, result, err);
	if (r == 0)
		r = local_plan_make(((const struct pack_head *)pack->data)->backend, result,
				    fetch_from_pack, pack, ret_plan, err);
	free(result);
	return r;
}

/* @ret_request: proto_buffer_deinit() */
static int encode_problem(const struct fmha_problem *problem, struct proto_buffer *ret_request,
			  struct fmha_error *err)
{
	struct proto_plan_params *params = calloc(1, sizeof(*params));
	int r;

	if (!params)
		return fmha_error_set(err, FMHA_ENOMEM, "plan: out of memory");
	r = local_problem(problem, params, err);
	if (r == 0)
		r = proto_encode_request(ret_request, 0, PROTO_LOCAL_PLAN, params, err);
	free(params);
	return r;
}

int fmha_local_pack_plan(struct fmha_local_pack *pack, const struct fmha_problem *problem,
			 struct fmha_local_plan **ret_plan, struct fmha_error *err)
{
	struct proto_buffer request = {0};
	int r;

	if (!pack || !problem || !ret_plan)
		return fmha_error_set(err, FMHA_EINVAL, "%s: an argument is NULL", __func__);
	r = encode_problem(problem, &request, err);
	if (r == 0)
		r = plan_from(pack, &request, ret_plan, err);
	proto_buffer_deinit(&request);
	return r;
}

/* ---- writing ---- */

struct writing {
	struct local_asking *asking;
	struct proto_buffer out; /* all records */
};

static int append(struct writing *w, const void *data, size_t bytes, struct fmha_error *err)
{
	if (proto_buffer_append(&w->out, data, bytes) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "pack: out of memory");
	return 0;
}

/* @more: a second part of the payload; NULL: none. */
static int add_record(struct writing *w, enum record_kind kind, const void *data, size_t bytes,
		      const void *more, size_t more_bytes, struct fmha_error *err)
{
	static const uint8_t zeros[PACK_ALIGN];
	const struct record_head head = {kind, bytes + more_bytes};
	int r = append(w, &head, sizeof(head), err);

	if (r == 0)
		r = append(w, data, bytes, err);
	if (r == 0 && more)
		r = append(w, more, more_bytes, err);
	return r < 0 ? r : append(w, zeros, (size_t)(-head.bytes % PACK_ALIGN), err);
}

static bool has_code(const struct writing *w, const uint8_t hash[LAUNCH_HASH_BYTES])
{
	const struct fmha_local_pack pack = {w->out.data, w->out.size};
	struct record record;
	size_t at = 0;

	while (next_record(&pack, &at, &record))
		if (record.kind == RECORD_CODE && memcmp(record.data, hash, LAUNCH_HASH_BYTES) == 0)
			return true;
	return false;
}

static int add_code(struct writing *w, const uint8_t hash[LAUNCH_HASH_BYTES],
		    struct fmha_error *err)
{
	size_t bytes;
	void *data;
	int r;

	if (has_code(w, hash))
		return 0;
	r = local_fetch_from_daemon(&w->asking->from, hash, &data, &bytes, err);
	if (r < 0)
		return r;
	r = add_record(w, RECORD_CODE, hash, LAUNCH_HASH_BYTES, data, bytes, err);
	(void)munmap(data, bytes);
	return r;
}

static int add_problem(struct writing *w, const struct fmha_problem *problem,
		       struct fmha_error *err)
{
	struct proto_buffer request = {0}, answer = {0};
	const struct proto_local_plan_result *result = &w->asking->result;
	int r = local_ask_daemon(w->asking, problem, err);

	if (r == 0)
		r = proto_encode_request(&request, 0, PROTO_LOCAL_PLAN, &w->asking->params, err);
	if (r == 0)
		r = proto_encode_result(&answer, 0, PROTO_LOCAL_PLAN, result, err);
	if (r == 0)
		r = add_record(w, RECORD_REQUEST, request.data, request.size, NULL, 0, err);
	if (r == 0)
		r = add_record(w, RECORD_ANSWER, answer.data, answer.size, NULL, 0, err);
	for (uint32_t i = 0; r == 0 && i < result->n_launches; i++)
		r = add_code(w, result->launches[i].code, err);
	proto_buffer_deinit(&request);
	proto_buffer_deinit(&answer);
	return r;
}

/* What was renamed there keeps its name when power is lost. */
static bool sync_folder(const char *path)
{
	const char *slash = strrchr(path, '/');
	char folder[4096] = ".";
	_cleanup_(closep) int fd = -1;

	if (slash)
		(void)snprintf(folder, sizeof(folder), "%.*s/", (int)(slash - path), path);
	fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd >= 0 && fsync(fd) == 0;
}

/* Readers see all of it or what was there before. */
static int store(const struct writing *w, const char *path, const struct pack_head *head,
		 struct fmha_error *err)
{
	char temporary[4096];
	FILE *file = NULL;
	bool good = false;

	if (snprintf(temporary, sizeof(temporary), "%s.%d", path, (int)getpid()) <
	    (int)sizeof(temporary))
		file = fopen(temporary, "wxe");
	if (file) {
		good = fwrite(head, sizeof(*head), 1, file) == 1 &&
		       fwrite(w->out.data, 1, w->out.size, file) == w->out.size &&
		       fflush(file) == 0 && fsync(fileno(file)) == 0;
		good = fclose(file) == 0 && good && rename(temporary, path) == 0 &&
		       sync_folder(path);
	}
	if (good)
		return 0;
	(void)fmha_error_set(err, FMHA_EIO, "%.200s: %s", path, strerror(errno));
	if (file)
		(void)unlink(temporary);
	return FMHA_EIO;
}

int fmha_local_pack_write(struct fmha_device *device, const struct fmha_problem *problems,
			  size_t n_problems, const struct fmha_local_options *options,
			  const char *path, struct fmha_error *err)
{
	struct pack_head head = {.magic = PACK_MAGIC};
	struct fmha_device_info info;
	struct writing w = {0};
	int r;

	r = client_check(device && problems && path ? device->client : NULL, __func__, err);
	if (r == 0)
		r = local_asking_new(device, options, &w.asking, err);
	for (size_t i = 0; i < n_problems && r == 0; i++)
		r = add_problem(&w, &problems[i], err);
	if (r == 0)
		r = fmha_device_info(device, &info, err);
	if (r == 0) {
		memcpy(head.backend, info.backend, sizeof(head.backend));
		head.bytes = w.out.size;
		head.sum = sum_of(0, w.out.data, w.out.size);
		r = store(&w, path, &head, err);
	}
	proto_buffer_deinit(&w.out);
	free(w.asking);
	return r;
}
