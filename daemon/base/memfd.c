/* SPDX-License-Identifier: MIT */
#include <base/memfd.h>

#include <errno.h>
#include <fcntl.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <proto/cleanup.h>
#include <proto/error.h>

/* ---- slabs ---- */

#ifdef __SANITIZE_ADDRESS__
#define EACH_BY_ITSELF 1 /* so that a use after its end is found */
#else
#define EACH_BY_ITSELF 0
#endif

struct slab {
	struct list in_slabs;
	struct place *free;
	uint32_t n_used;
	alignas(max_align_t) char places[];
};

/* Before each object. */
struct place {
	struct slab *slab;
	struct place *next; /* that is free, too */
	alignas(max_align_t) char object[];
};

void slabs_init(struct slabs *slabs, size_t bytes)
{
	size_t unit = alignof(max_align_t);

	*slabs = (struct slabs){.bytes = (sizeof(struct place) + bytes + unit - 1) / unit * unit};
	list_init(&slabs->with_room);
}

static struct slab *make_slab(const struct slabs *slabs)
{
	struct slab *slab = mmap(NULL, SLAB_BYTES, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	size_t n = (SLAB_BYTES - sizeof(*slab)) / slabs->bytes;

	if (slab == MAP_FAILED)
		return NULL;
	list_init(&slab->in_slabs);
	while (n-- > 0) {
		struct place *place = (struct place *)(slab->places + n * slabs->bytes);

		place->slab = slab;
		place->next = slab->free;
		slab->free = place;
	}
	return slab;
}

static struct slab *slab_with_room(struct slabs *slabs)
{
	struct slab *slab = slabs->spare;

	if (!list_is_empty(&slabs->with_room))
		return container_of(slabs->with_room.next, struct slab, in_slabs);
	slabs->spare = NULL;
	if (!slab)
		slab = make_slab(slabs);
	if (slab)
		list_append(&slabs->with_room, &slab->in_slabs);
	return slab;
}

void *slabs_take(struct slabs *slabs)
{
	struct place *place;
	struct slab *slab;

	if (EACH_BY_ITSELF)
		return calloc(1, slabs->bytes);
	slab = slab_with_room(slabs);
	if (!slab)
		return NULL;
	place = slab->free;
	slab->free = place->next;
	slab->n_used++;
	if (!slab->free)
		list_remove(&slab->in_slabs);
	return memset(place->object, 0, slabs->bytes - sizeof(*place));
}

void slabs_give_back(struct slabs *slabs, void *object)
{
	struct place *place;
	struct slab *slab;

	if (EACH_BY_ITSELF) {
		free(object);
		return;
	}
	place = container_of(object, struct place, object);
	slab = place->slab;
	if (!slab->free)
		list_append(&slabs->with_room, &slab->in_slabs);
	place->next = slab->free;
	slab->free = place;
	if (--slab->n_used > 0)
		return;
	list_remove(&slab->in_slabs);
	if (slabs->spare)
		(void)munmap(slab, SLAB_BYTES);
	else
		slabs->spare = slab;
}

#define LOOK_MS      50
#define LOOKS_A_TICK 128 /* two system calls each */
#define PAGE_BYTES   4096ull

struct memfd {
	struct list in_memfds;
	struct account *account;
	int fd; /* an open file description of our own: it is not the client's */
	uint64_t bytes;
};

static void end(struct memfd *memfd)
{
	list_remove(&memfd->in_memfds);
	memfd_release(memfd->account, memfd->bytes);
	(void)account_put(memfd->account);
	(void)close(memfd->fd);
	free(memfd);
}

static bool others_have(int fd)
{
	if (fcntl(fd, F_SETLEASE, F_WRLCK) == 0) {
		(void)fcntl(fd, F_SETLEASE, F_UNLCK);
		return false;
	}
	return errno == EAGAIN; /* where there are no leases, nobody can tell */
}

/* Some at a time, each in its turn: of one user until there is room for one more and @bytes, or
 * (@account NULL) of all. */
static void memfd_look(struct memfds *memfds, const struct account *account, uint64_t bytes)
{
	struct list later, *node;
	int n = LOOKS_A_TICK;

	list_init(&later);
	while (n > 0 && (node = list_pop(&memfds->list))) {
		struct memfd *memfd = container_of(node, struct memfd, in_memfds);

		list_append(&later, node);
		if (account && memfd->account != account)
			continue;
		n--;
		if (others_have(memfd->fd))
			continue;
		end(memfd);
		if (account && account_has_room(account, ACCOUNT_DESCRIPTORS, 1) &&
		    account_has_room(account, ACCOUNT_MEMORY, bytes))
			break;
	}
	while ((node = list_pop(&later)))
		list_append(&memfds->list, node);
	if (list_is_empty(&memfds->list))
		uv_timer_stop(&memfds->timer);
}

static void make_room(struct memfds *memfds, const struct account *account, uint64_t bytes)
{
	if (!account_has_room(account, ACCOUNT_DESCRIPTORS, 1) ||
	    !account_has_room(account, ACCOUNT_MEMORY, bytes))
		memfd_look(memfds, account, bytes);
}

static void memfd_on_timer(uv_timer_t *timer)
{
	memfd_look(container_of(timer, struct memfds, timer), NULL, 0);
}

void memfds_init(struct memfds *memfds, uv_loop_t *loop)
{
	uv_timer_init(loop, &memfds->timer);
	list_init(&memfds->list);
}

/* A second open file description of the same file; -1: failed. */
static int reopen(int fd)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDONLY | O_CLOEXEC);
}

int memfd_again(int fd)
{
	return reopen(fd);
}

int memfd_keep(struct memfds *memfds, struct account *account, int fd, uint64_t bytes, int *ret_fd,
	       struct fmha_error *err)
{
	struct memfd *memfd = malloc(sizeof(*memfd));
	int own = memfd ? reopen(fd) : -1, theirs = own < 0 ? -1 : reopen(fd);

	if (theirs < 0) {
		if (own >= 0)
			(void)close(own);
		free(memfd);
		return fmha_error_set(err, FMHA_ENOMEM, "no memory for the answer");
	}
	*ret_fd = theirs;
	*memfd = (struct memfd){.account = account, .fd = own, .bytes = bytes};
	account->n_references++;
	list_init(&memfd->in_memfds);
	list_append(&memfds->list, &memfd->in_memfds);
	if (!uv_is_active((uv_handle_t *)&memfds->timer))
		uv_timer_start(&memfds->timer, memfd_on_timer, LOOK_MS, LOOK_MS);
	return 0;
}

bool memfd_seal(int fd)
{
	return fchmod(fd, 0400) == 0 &&
	       fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) ==
		       0;
}

bool memfd_is_sealed(int fd, uint64_t bytes)
{
	const int needed = F_SEAL_SHRINK | F_SEAL_WRITE;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	return seals >= 0 && (seals & needed) == needed && fstat(fd, &st) == 0 &&
	       (uint64_t)st.st_size >= bytes;
}

int memfd_file(const void *data, size_t n)
{
	_cleanup_(closep) int fd = memfd_create("fmhad", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -1;
	for (size_t done = 0; done < n;) {
		ssize_t written = write(fd, (const char *)data + done, n - done);

		if (written <= 0)
			return -1;
		done += (size_t)written;
	}
	return memfd_seal(fd) ? take_fd(&fd) : -1;
}

int memfd_read(int fd, size_t most, char **ret_text, size_t *ret_size, struct fmha_error *err)
{
	size_t done = 0, size;
	ssize_t n = 1;
	struct stat st;
	char *text;

	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "a document has not arrived");
	if (!S_ISREG(st.st_mode))
		return fmha_error_refuse(err, "fd", "not a file or memfd");
	if (st.st_size > (off_t)most)
		return fmha_error_set_field(err, FMHA_EINVAL, "fd", "fd: more than %zu MiB",
					    most >> 20);
	size = (size_t)st.st_size;
	text = malloc(size + 1);
	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "document: out of memory");
	while (done < size && n > 0) { /* shorter than it was: the parser will say so */
		n = pread(fd, text + done, size - done, (off_t)done);
		if (n > 0)
			done += (size_t)n;
		else if (n < 0 && errno == EINTR)
			n = 1;
	}
	if (n < 0) {
		free(text);
		return fmha_error_set(err, FMHA_EIO, "document: %s", strerror(errno));
	}
	text[done] = '\0';
	*ret_text = text;
	*ret_size = done;
	return 0;
}

static int keep_text(struct memfds *memfds, struct account *account, const char *text, size_t n,
		     uint64_t bytes, int *ret_fd, struct fmha_error *err)
{
	_cleanup_(closep) int fd = memfd_file(text, n);

	if (fd < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "no memory for the answer");
	return memfd_keep(memfds, account, fd, bytes, ret_fd, err);
}

int memfd_charge(struct memfds *memfds, struct account *account, uint64_t bytes,
		 struct fmha_error *err)
{
	int r;

	make_room(memfds, account, bytes);
	r = account_charge(account, ACCOUNT_DESCRIPTORS, 1, err);
	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0)
		account_release(account, ACCOUNT_DESCRIPTORS, 1);
	return r;
}

int memfd_charge_more(struct memfds *memfds, struct account *account, uint64_t bytes,
		      struct fmha_error *err)
{
	make_room(memfds, account, bytes);
	return account_charge(account, ACCOUNT_MEMORY, bytes, err);
}

void memfd_release(struct account *account, uint64_t bytes)
{
	account_release(account, ACCOUNT_MEMORY, bytes);
	account_release(account, ACCOUNT_DESCRIPTORS, 1);
}

int memfd_text(struct memfds *memfds, struct account *account, const char *text, size_t n,
	       int *ret_fd, struct fmha_error *err)
{
	uint64_t bytes = (n + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
	int r;

	r = memfd_charge(memfds, account, bytes, err);
	if (r < 0)
		return r;
	r = keep_text(memfds, account, text, n, bytes, ret_fd, err);
	if (r < 0)
		memfd_release(account, bytes);
	return r;
}
