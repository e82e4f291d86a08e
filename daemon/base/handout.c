/* SPDX-License-Identifier: MIT */
#include <base/handout.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <proto/cleanup.h>
#include <proto/error.h>

#define LOOK_MS      50
#define LOOKS_A_TICK 128 /* two system calls each */
#define PAGE_BYTES   4096ull

struct handout {
	struct list in_handouts;
	struct account *account;
	int fd; /* an open file description of our own: it is not the client's */
	uint64_t bytes;
};

static void end(struct handout *handout)
{
	list_remove(&handout->in_handouts);
	handout_release(handout->account, handout->bytes);
	(void)account_put(handout->account);
	(void)close(handout->fd);
	free(handout);
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
static void look(struct handouts *handouts, const struct account *account, uint64_t bytes)
{
	struct list later, *node;
	int n = LOOKS_A_TICK;

	list_init(&later);
	while (n > 0 && (node = list_pop(&handouts->list))) {
		struct handout *handout = container_of(node, struct handout, in_handouts);

		list_append(&later, node);
		if (account && handout->account != account)
			continue;
		n--;
		if (others_have(handout->fd))
			continue;
		end(handout);
		if (account && account_has_room(account, ACCOUNT_DESCRIPTORS, 1) &&
		    account_has_room(account, ACCOUNT_MEMORY, bytes))
			break;
	}
	while ((node = list_pop(&later)))
		list_append(&handouts->list, node);
	if (list_is_empty(&handouts->list))
		uv_timer_stop(&handouts->timer);
}

static void make_room(struct handouts *handouts, const struct account *account, uint64_t bytes)
{
	if (!account_has_room(account, ACCOUNT_DESCRIPTORS, 1) ||
	    !account_has_room(account, ACCOUNT_MEMORY, bytes))
		look(handouts, account, bytes);
}

static void on_timer(uv_timer_t *timer)
{
	look(container_of(timer, struct handouts, timer), NULL, 0);
}

void handouts_init(struct handouts *handouts, uv_loop_t *loop)
{
	uv_timer_init(loop, &handouts->timer);
	list_init(&handouts->list);
}

/* A second open file description of the same file; -1: failed. */
static int reopen(int fd)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDONLY | O_CLOEXEC);
}

int handout_again(int fd)
{
	return reopen(fd);
}

int handout_keep(struct handouts *handouts, struct account *account, int fd, uint64_t bytes,
		 int *ret_fd, struct fmha_error *err)
{
	struct handout *handout = malloc(sizeof(*handout));
	int own = handout ? reopen(fd) : -1, theirs = own < 0 ? -1 : reopen(fd);

	if (theirs < 0) {
		if (own >= 0)
			(void)close(own);
		free(handout);
		return fmha_error_set(err, FMHA_ENOMEM, "no memory for the answer");
	}
	*ret_fd = theirs;
	*handout = (struct handout){.account = account, .fd = own, .bytes = bytes};
	account->n_references++;
	list_init(&handout->in_handouts);
	list_append(&handouts->list, &handout->in_handouts);
	if (!uv_is_active((uv_handle_t *)&handouts->timer))
		uv_timer_start(&handouts->timer, on_timer, LOOK_MS, LOOK_MS);
	return 0;
}

bool handout_seal(int fd)
{
	return fchmod(fd, 0400) == 0 &&
	       fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) ==
		       0;
}

bool handout_is_sealed(int fd, uint64_t bytes)
{
	const int needed = F_SEAL_SHRINK | F_SEAL_WRITE;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	return seals >= 0 && (seals & needed) == needed && fstat(fd, &st) == 0 &&
	       (uint64_t)st.st_size >= bytes;
}

int handout_file(const void *data, size_t n)
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
	return handout_seal(fd) ? take_fd(&fd) : -1;
}

int handout_read(int fd, size_t most, char **ret_text, size_t *ret_size, struct fmha_error *err)
{
	size_t done = 0, size;
	ssize_t n = 1;
	struct stat st;
	char *text;

	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "a document has not arrived");
	if (!S_ISREG(st.st_mode))
		return fmha_error_set_field(err, FMHA_EINVAL, "fd", "fd: not a file or memfd");
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

static int keep_text(struct handouts *handouts, struct account *account, const char *text, size_t n,
		     uint64_t bytes, int *ret_fd, struct fmha_error *err)
{
	_cleanup_(closep) int fd = handout_file(text, n);

	if (fd < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "no memory for the answer");
	return handout_keep(handouts, account, fd, bytes, ret_fd, err);
}

int handout_charge(struct handouts *handouts, struct account *account, uint64_t bytes,
		   struct fmha_error *err)
{
	int r;

	make_room(handouts, account, bytes);
	r = account_charge(account, ACCOUNT_DESCRIPTORS, 1, err);
	if (r < 0)
		return r;
	r = account_charge(account, ACCOUNT_MEMORY, bytes, err);
	if (r < 0)
		account_release(account, ACCOUNT_DESCRIPTORS, 1);
	return r;
}

int handout_charge_more(struct handouts *handouts, struct account *account, uint64_t bytes,
			struct fmha_error *err)
{
	make_room(handouts, account, bytes);
	return account_charge(account, ACCOUNT_MEMORY, bytes, err);
}

void handout_release(struct account *account, uint64_t bytes)
{
	account_release(account, ACCOUNT_MEMORY, bytes);
	account_release(account, ACCOUNT_DESCRIPTORS, 1);
}

int handout_text(struct handouts *handouts, struct account *account, const char *text, size_t n,
		 int *ret_fd, struct fmha_error *err)
{
	uint64_t bytes = (n + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
	int r;

	r = handout_charge(handouts, account, bytes, err);
	if (r < 0)
		return r;
	r = keep_text(handouts, account, text, n, bytes, ret_fd, err);
	if (r < 0)
		handout_release(account, bytes);
	return r;
}
