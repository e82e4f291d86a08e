/* SPDX-License-Identifier: MIT */
/* buffer.c: memory that both sides map. */
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3; older kernels refuse it */
#define MFD_NOEXEC_SEAL 0x0008U
#endif

#define SEALS_WANTED (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

int fmha_memfd_new(uint64_t size, int *ret_fd, struct fmha_error *err)
{
	int fd, e;

	if (!ret_fd)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_memfd_new: ret_fd is NULL");
	if (size == 0 || size > INT64_MAX)
		return fmha_error_set_field(err, FMHA_EINVAL, "size", "a memfd of %llu bytes",
					    (unsigned long long)size);
	fd = memfd_create("fmha", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("fmha", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return fmha_error_set(err, FMHA_EIO, "memfd_create: %s", strerror(errno));
	if (ftruncate(fd, (off_t)size) == 0 && fcntl(fd, F_ADD_SEALS, SEALS_WANTED) == 0) {
		*ret_fd = fd;
		return 0;
	}
	e = errno;
	(void)close(fd);
	return fmha_error_set(err, e == ENOMEM ? FMHA_ENOMEM : FMHA_EIO, "memfd of %llu bytes: %s",
			      (unsigned long long)size, strerror(e));
}

/* ---- the table ---- */

static struct fmha_buffer **buffer_bucket(struct fmha_device *device, uint64_t id)
{
	return &device->buffers[id % BUFFER_BUCKETS];
}

static void table_add(struct fmha_buffer *buffer)
{
	struct fmha_device *device = buffer->device;
	struct fmha_buffer **bucket;

	(void)pthread_mutex_lock(&device->lock);
	buffer->id = device->next_buffer_id++;
	bucket = buffer_bucket(device, buffer->id);
	buffer->next = *bucket;
	*bucket = buffer;
	(void)pthread_mutex_unlock(&device->lock);
}

/* In a forked child the lock may be held for ever by a thread that does not exist here. */
static void table_remove(struct fmha_buffer *buffer)
{
	struct fmha_device *device = buffer->device;

	if (!client_in_child(device->client))
		(void)pthread_mutex_lock(&device->lock);
	else if (pthread_mutex_trylock(&device->lock) != 0)
		return;
	for (struct fmha_buffer **p = buffer_bucket(device, buffer->id); *p; p = &(*p)->next) {
		if (*p == buffer) {
			*p = buffer->next;
			break;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
}

struct fmha_buffer *buffer_find(struct fmha_device *device, uint64_t id)
{
	struct fmha_buffer *buffer;

	(void)pthread_mutex_lock(&device->lock);
	for (buffer = *buffer_bucket(device, id); buffer; buffer = buffer->next) {
		if (buffer->id == id) {
			(void)__atomic_add_fetch(&buffer->refs, 1, __ATOMIC_RELAXED);
			break;
		}
	}
	(void)pthread_mutex_unlock(&device->lock);
	return buffer;
}

/* ---- life ---- */

static struct fmha_buffer *buffer_alloc(struct fmha_device *device, uint64_t size, bool internal,
					struct fmha_error *err)
{
	struct fmha_buffer *buffer = calloc(1, sizeof(*buffer));

	if (!buffer) {
		(void)fmha_error_set(err, FMHA_ENOMEM, "buffer: out of memory");
		return NULL;
	}
	if (timed_lock_init(&buffer->at_worker.lock, err) < 0) {
		free(buffer);
		return NULL;
	}
	buffer->refs = 1;
	buffer->device = internal ? device : device_ref(device);
	buffer->internal = internal;
	buffer->size = size;
	buffer->fd = -1;
	return buffer;
}

struct fmha_buffer *buffer_unref(struct fmha_buffer *buffer)
{
	if (!buffer || __atomic_sub_fetch(&buffer->refs, 1, __ATOMIC_ACQ_REL) != 0)
		return NULL;
	buffer->view = fmha_view_free(buffer->view);
	if (buffer->data)
		(void)munmap(buffer->data, buffer->size);
	if (buffer->fd >= 0)
		(void)close(buffer->fd);
	timed_lock_deinit(&buffer->at_worker.lock);
	if (!buffer->internal)
		(void)device_unref(buffer->device);
	free(buffer);
	return NULL;
}

/*
 * Maps a memfd. Without the seal against shrinking its other owner could cut it off under us, and
 * touching it would be SIGBUS.
 */
static int map_memfd(struct fmha_buffer *buffer, int bad_fd_code, const char *whose,
		     struct fmha_error *err)
{
	int seals = fcntl(buffer->fd, F_GET_SEALS);
	struct stat st;
	void *data;

	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return fmha_error_set_field(err, bad_fd_code, "fd",
					    "%s is no memfd sealed against shrinking", whose);
	if (fstat(buffer->fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "fstat: %s", strerror(errno));
	if (buffer->base_offset > (uint64_t)st.st_size ||
	    buffer->size > (uint64_t)st.st_size - buffer->base_offset)
		return fmha_error_set_field(err, bad_fd_code, "size",
					    "%s has %lld bytes, not %llu at offset %llu", whose,
					    (long long)st.st_size, (unsigned long long)buffer->size,
					    (unsigned long long)buffer->base_offset);
	data = mmap(NULL, buffer->size, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd,
		    (off_t)buffer->base_offset);
	if (data == MAP_FAILED)
		return fmha_error_set(err, errno == ENOMEM ? FMHA_ENOMEM : FMHA_EIO,
				      "mapping %llu bytes: %s", (unsigned long long)buffer->size,
				      strerror(errno));
	buffer->data = data;
	return 0;
}

int buffer_new(struct fmha_device *device, uint64_t size, bool internal, int64_t deadline,
	       struct fmha_buffer **ret_buffer, struct fmha_error *err)
{
	const struct proto_buffer_create_params params = {.size = size};
	struct proto_buffer_result result;
	struct fmha_buffer *buffer;
	int r = FMHA_EDEVICE;

	buffer = buffer_alloc(device, size, internal, err);
	if (!buffer)
		return FMHA_ENOMEM;
	/* Not link_call(): the generation that made the buffer must be known. */
	for (int attempt = 0; attempt < 2 && r == FMHA_EDEVICE; attempt++) {
		struct connection *c;

		r = link_get(&device->worker, deadline, &c, &buffer->at_worker.generation, err);
		if (r < 0)
			break;
		r = connection_call(c, PROTO_BUFFER_CREATE, &params, -1, deadline, &result,
				    &buffer->fd, err);
		c = connection_unref(c);
	}
	if (r == 0) {
		buffer->at_worker.worker_id = result.buffer;
		buffer->kind = result.kind;
		buffer->allocation_bytes = result.allocation_bytes;
		/* The CPU does not see a GPU's memory. */
		if (result.kind == PROTO_MEMFD)
			r = map_memfd(buffer, FMHA_EPROTO, "what the worker allocated", err);
	}
	if (r < 0) {
		buffer = buffer_unref(buffer);
		return r;
	}
	table_add(buffer);
	*ret_buffer = buffer;
	return 0;
}

void buffer_release(struct fmha_buffer *buffer)
{
	const struct proto_buffer_release_params params = {buffer->at_worker.worker_id};

	table_remove(buffer);
	registration_end(&buffer->at_worker, buffer->device, PROTO_BUFFER_RELEASE, &params);
	(void)buffer_unref(buffer);
}

int fmha_buffer_new(struct fmha_device *device, uint64_t size, struct fmha_buffer **ret_buffer,
		    struct fmha_error *err)
{
	int r;

	if (!device || !ret_buffer)
		return fmha_error_set(err, FMHA_EINVAL, "fmha_buffer_new: an argument is NULL");
	if (size == 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "size",
					    "a buffer has at least 1 byte");
	r = client_check_process(device->client, err);
	if (r < 0)
		return r;
	return buffer_new(device, size, false, client_deadline(device->client), ret_buffer, err);
}

/* ---- import ---- */

static int import_at_worker(void *object, struct connection *c, uint64_t generation,
			    int64_t deadline, uint64_t *ret_worker_id, struct fmha_error *err)
{
	const struct fmha_buffer *buffer = object;
	struct proto_buffer_import_params params = {
		.size = buffer->size,
		.base_offset = buffer->base_offset,
	};
	struct proto_buffer_result result;
	int r;

	(void)generation;
	_Static_assert((int)FMHA_MEMORY_FD == (int)PROTO_MEMFD &&
			       (int)FMHA_MEMORY_IPC_HANDLE == (int)PROTO_IPC_HANDLE &&
			       (int)FMHA_MEMORY_VMM_FD == (int)PROTO_VMM_FD,
		       "memory kinds travel as they are");
	_Static_assert(sizeof(params.handle) == FMHA_HANDLE_BYTES, "handles have one length");
	params.kind = buffer->kind;
	if (buffer->kind == FMHA_MEMORY_FD_OR_HANDLE)
		params.kind = c->takes_descriptors ? PROTO_VMM_FD : PROTO_IPC_HANDLE;
	if (params.kind == PROTO_IPC_HANDLE) {
		memcpy(params.handle, buffer->handle, sizeof(params.handle));
		params.handle_bytes = buffer->handle_bytes;
	}
	r = connection_call(c, PROTO_BUFFER_IMPORT, &params,
			    params.kind == PROTO_IPC_HANDLE ? -1 : buffer->fd, deadline, &result,
			    NULL, err);
	if (r == 0)
		*ret_worker_id = result.buffer;
	return r;
}

static bool has_handle(uint32_t kind)
{
	return kind == FMHA_MEMORY_IPC_HANDLE || kind == FMHA_MEMORY_FD_OR_HANDLE;
}

static int check_memory(const struct fmha_memory *memory, struct fmha_error *err)
{
	int r = check_struct_size(memory->struct_size, sizeof(*memory), "fmha_memory", err);

	if (r < 0)
		return r;
	if (memory->kind > FMHA_MEMORY_FD_OR_HANDLE)
		return fmha_error_set_field(err, FMHA_EINVAL, "kind",
					    "kind %u: no such kind of memory", memory->kind);
	if (memory->size == 0 || memory->size > INT64_MAX)
		return fmha_error_set_field(err, FMHA_EINVAL, "size", "size %llu: 1 to 2^63 - 1",
					    (unsigned long long)memory->size);
	if (memory->base_offset > INT64_MAX - memory->size)
		return fmha_error_set_field(err, FMHA_EINVAL, "base_offset",
					    "base_offset %llu + size exceeds 2^63 - 1",
					    (unsigned long long)memory->base_offset);
	if (memory->kind == FMHA_MEMORY_FD &&
	    memory->base_offset % (uint64_t)sysconf(_SC_PAGESIZE) != 0)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "base_offset",
			"base_offset %llu of a memfd: not a multiple of the page size",
			(unsigned long long)memory->base_offset);
	if (has_handle(memory->kind) &&
	    (memory->handle_bytes == 0 || memory->handle_bytes > FMHA_HANDLE_BYTES))
		return fmha_error_set_field(err, FMHA_EINVAL, "handle_bytes",
					    "handle_bytes %u: 1 to %u", memory->handle_bytes,
					    FMHA_HANDLE_BYTES);
	return 0;
}

static int import_memory(struct fmha_buffer *buffer, const struct fmha_memory *memory,
			 struct fmha_error *err)
{
	buffer->kind = memory->kind;
	buffer->base_offset = memory->base_offset;
	if (has_handle(memory->kind)) {
		memcpy(buffer->handle, memory->handle, memory->handle_bytes);
		buffer->handle_bytes = memory->handle_bytes;
	}
	if (memory->kind == FMHA_MEMORY_IPC_HANDLE)
		return 0;
	buffer->fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
	if (buffer->fd < 0)
		return fmha_error_set_field(err, errno == EBADF ? FMHA_EINVAL : FMHA_EIO, "fd",
					    "fd %d: %s", memory->fd, strerror(errno));
	if (memory->kind != FMHA_MEMORY_FD)
		return 0;
	return map_memfd(buffer, FMHA_EINVAL, "the file descriptor", err);
}

int buffer_import(struct fmha_device *device, const struct fmha_memory *memory, bool internal,
		  int64_t deadline, struct fmha_buffer **ret_buffer, struct fmha_error *err)
{
	struct fmha_buffer *buffer = buffer_alloc(device, memory->size, internal, err);
	int r;

	if (!buffer)
		return FMHA_ENOMEM;
	r = import_memory(buffer, memory, err);
	if (r < 0) {
		buffer = buffer_unref(buffer);
		return r;
	}
	table_add(buffer);
	r = registration_begin(&buffer->at_worker, import_at_worker, buffer, device, deadline, err);
	if (r < 0) {
		table_remove(buffer);
		buffer = buffer_unref(buffer);
		return r;
	}
	*ret_buffer = buffer;
	return 0;
}

int fmha_buffer_import(struct fmha_device *device, const struct fmha_memory *memory,
		       struct fmha_buffer **ret_buffer, struct fmha_error *err)
{
	int r;

	r = client_check(device && memory && ret_buffer ? device->client : NULL, __func__, err);
	if (r == 0)
		r = check_memory(memory, err);
	if (r < 0)
		return r;
	return buffer_import(device, memory, false, client_deadline(device->client), ret_buffer,
			     err);
}

int buffer_attach(struct fmha_buffer *buffer, int64_t deadline, uint64_t *ret_generation,
		  struct fmha_error *err)
{
	int r = registration_begin(&buffer->at_worker, import_at_worker, buffer, buffer->device,
				   deadline, err);

	if (r == 0)
		*ret_generation = buffer->at_worker.generation;
	return r;
}

int buffer_bind(struct fmha_device *device, uint64_t id, struct connection *connection,
		uint64_t generation, int64_t deadline, uint64_t *ret_worker_id,
		struct fmha_error *err)
{
	struct fmha_buffer *buffer = buffer_find(device, id);
	int r;

	if (!buffer)
		return fmha_error_set(err, FMHA_ENOENT,
				      "buffer %llu: no such buffer of this device",
				      (unsigned long long)id);
	r = registration_bind(&buffer->at_worker, import_at_worker, buffer, connection, generation,
			      deadline, ret_worker_id, err);
	buffer = buffer_unref(buffer);
	return r;
}

/* ---- what a program asks of a buffer ---- */

uint64_t fmha_buffer_id(const struct fmha_buffer *buffer)
{
	return buffer ? buffer->id : 0;
}

void *fmha_buffer_data(const struct fmha_buffer *buffer)
{
	return buffer ? buffer->data : NULL;
}

uint64_t fmha_buffer_size(const struct fmha_buffer *buffer)
{
	return buffer ? buffer->size : 0;
}

int fmha_buffer_fd(const struct fmha_buffer *buffer)
{
	return buffer ? buffer->fd : -1;
}

struct fmha_buffer *fmha_buffer_free(struct fmha_buffer *buffer)
{
	if (!buffer)
		return NULL;
	if (!client_in_child(buffer->device->client))
		buffer->device->hooks->on_buffer_free(buffer->device, buffer->id);
	buffer_release(buffer);
	return NULL;
}
