/* SPDX-License-Identifier: MIT */
/*
 * try_sharing.c: whether memory gets from one process to another with this runtime, tried before a client has to rely on it.
 *
 * Two processes of fmhad's own do what clients and workers do: one gives memory away, the other takes it, and what either
 * writes the other has to read. They are not the worker, since a runtime that fails may end or hold up its process. Both
 * ways are tried, by dma-buf and by IPC handle; the taker writes a line for each: empty, or what is wrong.
 */
#include "hip_api.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <base/clock.h>

#include "gpu.h"

#define BYTES      ((size_t)2 << 20)
#define WORDS      (BYTES / sizeof(uint32_t))
#define DEADLINE_S 8
#define LINE       96

enum way { BY_DESCRIPTOR, BY_HANDLE, N_WAYS };
enum writer { GIVER = 1, TAKER, NEXT_OWNER }; /* each writes words of its own */

/* ---- one of the two ---- */

struct peer {
	int device, other; /* the socket */
	hipStream_t stream;
	uint32_t *host;
};

/* From one to the other; with a descriptor at times. */
struct note {
	char trouble[LINE]; /* empty: go on */
	uint8_t handle[GPU_HANDLE_BYTES];
};

static uint32_t word_of(enum writer writer, size_t i)
{
	return (uint32_t)(i * 2654435761u) ^ ((uint32_t)writer << 28);
}

__attribute__((format(printf, 2, 3))) static bool wrong(struct note *note, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	(void)vsnprintf(note->trouble, sizeof(note->trouble), format, arguments);
	va_end(arguments);
	return false;
}

static bool write_words(struct peer *peer, void *pointer, enum writer writer, struct note *note)
{
	hipError_t status;

	for (size_t i = 0; i < WORDS; i++)
		peer->host[i] = word_of(writer, i);
	status = hipMemcpyHtoDAsync((hipDeviceptr_t)pointer, peer->host, BYTES, peer->stream);
	if (status == hipSuccess)
		status = hipStreamSynchronize(peer->stream);
	return status == hipSuccess ||
	       wrong(note, "writing it failed (%s)", hipGetErrorName(status));
}

/* @trouble: when other words are there. */
static bool read_words(struct peer *peer, void *pointer, enum writer writer, const char *trouble,
		       struct note *note)
{
	hipError_t status;

	memset(peer->host, 0, BYTES);
	status = hipMemcpyDtoHAsync(peer->host, (hipDeviceptr_t)pointer, BYTES, peer->stream);
	if (status == hipSuccess)
		status = hipStreamSynchronize(peer->stream);
	if (status != hipSuccess)
		return wrong(note, "reading it failed (%s)", hipGetErrorName(status));
	for (size_t i = 0; i < WORDS; i++)
		if (peer->host[i] != word_of(writer, i))
			return wrong(note, "%s", trouble);
	return true;
}

/* @fd: -1: none. */
static void tell(struct peer *peer, const struct note *note, int fd)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec text = {(void *)note, sizeof(*note)};
	struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};

	if (fd >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)),
						  .cmsg_level = SOL_SOCKET,
						  .cmsg_type = SCM_RIGHTS};
		memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	}
	(void)sendmsg(peer->other, &message, MSG_NOSIGNAL);
}

/* Return: whether the other one goes on. Where it is gone, this one goes, too: the worker sees how it ended. @ret_fd: NULL:
 * none is wanted. */
static bool hear(struct peer *peer, struct note *ret_note, int *ret_fd)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec text = {ret_note, sizeof(*ret_note)};
	struct msghdr message = {.msg_iov = &text,
				 .msg_iovlen = 1,
				 .msg_control = &control,
				 .msg_controllen = sizeof(control)};

	if (recvmsg(peer->other, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof(*ret_note))
		_exit(EXIT_FAILURE);
	ret_note->trouble[LINE - 1] = '\0';
	if (ret_fd) {
		*ret_fd = -1;
		if (message.msg_controllen >= CMSG_LEN(sizeof(int)))
			memcpy(ret_fd, CMSG_DATA(&control.header), sizeof(*ret_fd));
	}
	return !ret_note->trouble[0];
}

static hipError_t make(enum way way, int device, struct gpu_mapping *ret_mapping, int *ret_fd,
		       struct note *note)
{
	hipIpcMemHandle_t handle;
	hipError_t status;

	if (way == BY_DESCRIPTOR)
		return gpu_vmm_create(BYTES, device, ret_mapping, ret_fd);
	*ret_mapping = (struct gpu_mapping){.bytes = BYTES};
	status = hipMalloc(&ret_mapping->pointer, BYTES);
	if (status != hipSuccess)
		return status;
	status = hipIpcGetMemHandle(&handle, ret_mapping->pointer);
	if (status != hipSuccess)
		(void)hipFree(ret_mapping->pointer);
	else
		memcpy(note->handle, &handle, sizeof(note->handle));
	return status;
}

/* The memory goes back and is somebody else's: who has opened it keeps what he has. */
static void pass_on(struct peer *peer, const struct gpu_mapping *mapping)
{
	struct note note = {0}, answer;
	void *next = NULL;

	(void)gpu_vmm_free(mapping);
	if (hipMalloc(&next, BYTES) != hipSuccess)
		next = NULL;
	if (next)
		(void)write_words(peer, next, NEXT_OWNER, &note);
	tell(peer, &note, -1);
	(void)hear(peer, &answer, NULL);
	if (next)
		(void)hipFree(next);
}

static void give(struct peer *peer, enum way way)
{
	struct note note = {0}, answer;
	struct gpu_mapping mapping;
	hipError_t status;
	int fd = -1;

	status = make(way, peer->device, &mapping, &fd, &note);
	if (status != hipSuccess) {
		(void)wrong(&note, "the runtime makes none (%s)", hipGetErrorName(status));
		tell(peer, &note, -1);
		return;
	}
	(void)write_words(peer, mapping.pointer, GIVER, &note);
	tell(peer, &note, fd);
	if (fd >= 0)
		(void)close(fd);
	if (!note.trouble[0] && hear(peer, &answer, NULL)) {
		(void)read_words(peer, mapping.pointer, TAKER,
				 "its owner does not read what another process writes", &note);
		tell(peer, &note, -1);
		if (!note.trouble[0] && way == BY_DESCRIPTOR) {
			pass_on(peer, &mapping);
			return;
		}
	}
	(void)hipFree(mapping.pointer);
}

static hipError_t take_it(enum way way, struct peer *peer, const struct note *offer, int fd,
			  struct gpu_mapping *ret_mapping)
{
	hipIpcMemHandle_t handle;
	hipError_t status;

	if (way == BY_DESCRIPTOR)
		return gpu_vmm_import(fd, BYTES, peer->device, ret_mapping);
	*ret_mapping = (struct gpu_mapping){.bytes = BYTES};
	memcpy(&handle, offer->handle, sizeof(handle));
	status = hipIpcOpenMemHandle(&ret_mapping->pointer, handle, hipIpcMemLazyEnablePeerAccess);
	if (status != hipSuccess)
		return status;
	status = gpu_check_mapping(ret_mapping->pointer, BYTES);
	if (status != hipSuccess)
		(void)hipIpcCloseMemHandle(ret_mapping->pointer);
	return status;
}

/* What either writes the other reads, and by descriptor it stays when its first owner gives it back. */
static bool use_both_ways(enum way way, struct peer *peer, void *pointer, struct note *note)
{
	if (read_words(peer, pointer, GIVER, "another process does not read what its owner writes",
		       note))
		(void)write_words(peer, pointer, TAKER, note);
	tell(peer, note, -1);
	if (note->trouble[0] || !hear(peer, note, NULL))
		return false;
	if (way == BY_HANDLE)
		return true;
	if (hear(peer, note, NULL))
		(void)read_words(peer, pointer, TAKER,
				 "what it holds is lost when its owner gives it back", note);
	tell(peer, note, -1);
	return !note->trouble[0];
}

static hipError_t give_back(enum way way, const struct gpu_mapping *mapping)
{
	return way == BY_DESCRIPTOR ? gpu_vmm_free(mapping)
				    : hipIpcCloseMemHandle(mapping->pointer);
}

/* What had the number of a descriptor that was imported is closed by nobody else. */
static bool is_kept(int placeholder, const struct stat *before)
{
	struct stat now;

	return fstat(placeholder, &now) == 0 && now.st_ino == before->st_ino &&
	       now.st_dev == before->st_dev;
}

static void take(struct peer *peer, enum way way)
{
	struct gpu_mapping mapping;
	struct stat held = {0};
	struct note note;
	hipError_t status;
	int fd = -1, placeholder = -1;

	if (hear(peer, &note, &fd)) {
		status = take_it(way, peer, &note, fd, &mapping);
		if (status == hipSuccess) {
			/* Has the number that the import had. */
			placeholder = fcntl(peer->other, F_DUPFD_CLOEXEC, 0);
			(void)fstat(placeholder, &held);
			if (use_both_ways(way, peer, mapping.pointer, &note)) {
				status = give_back(way, &mapping);
				if (status != hipSuccess)
					(void)wrong(&note, "it cannot be given back (%s)",
						    hipGetErrorName(status));
				else if (!is_kept(placeholder, &held))
					(void)wrong(&note, "the runtime closes descriptors that "
							   "are not its own");
			}
		} else {
			(void)wrong(&note, "another process cannot open it (%s)",
				    hipGetErrorName(status));
			tell(peer, &note, -1);
		}
	}
	if (placeholder >= 0)
		(void)close(placeholder);
	if (fd >= 0)
		(void)close(fd);
	(void)dprintf(STDOUT_FILENO, "%s\n", note.trouble);
}

/* @role: "give" or "take", and the way to begin with. */
int gpu_trial_peer(uint32_t device, const char *role)
{
	struct peer peer = {.device = (int)device, .other = STDIN_FILENO};
	int last = (int)strlen(role) - 1;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	(void)alarm(2 * DEADLINE_S);
	if (last < 0 || gpu_init() != hipSuccess || hipSetDevice(peer.device) != hipSuccess ||
	    hipStreamCreateWithFlags(&peer.stream, hipStreamNonBlocking) != hipSuccess)
		return EXIT_FAILURE;
	peer.host = malloc(BYTES);
	if (!peer.host)
		return EXIT_FAILURE;
	for (int way = role[last] - '0'; way < N_WAYS; way++) {
		if (role[0] == 'g')
			give(&peer, (enum way)way);
		else
			take(&peer, (enum way)way);
	}
	/* Without what a runtime does at an end: it has been known to hang. */
	_exit(EXIT_SUCCESS);
}

/* ---- the worker ---- */

struct gpu_trial {
	int device;
	pid_t pids[2]; /* giver, taker; 0: there is none */
	int lines;     /* what the taker writes; -1: none */
	uint64_t until_ns;
};

static pid_t start(int device, const char *role, int other, int out)
{
	char number[16], text[16], name[] = "fmhad-trial", option[] = "--trial",
				   backend[] = GPU_BACKEND;
	char *argv[] = {name, option, backend, number, text, NULL};
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	pid_t pid = 0;
	int failed;

	(void)snprintf(number, sizeof(number), "%d", device);
	(void)snprintf(text, sizeof(text), "%s", role);
	(void)sigemptyset(&none);
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawnattr_init(&attributes);
	(void)posix_spawnattr_setsigmask(&attributes, &none);
	(void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
	failed = posix_spawn_file_actions_adddup2(&actions, other, STDIN_FILENO) != 0 ||
		 posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO) != 0 ||
		 posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, argv, environ) != 0;
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)posix_spawnattr_destroy(&attributes);
	return failed ? 0 : pid;
}

/* Tries from @first on. */
static void begin(struct gpu_trial *trial, enum way first)
{
	char role[16];
	int pair[2], out[2];

	trial->pids[0] = trial->pids[1] = 0;
	trial->lines = -1;
	trial->until_ns = clock_ns() + DEADLINE_S * NS_PER_S;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return;
	if (pipe2(out, O_CLOEXEC) == 0) {
		(void)snprintf(role, sizeof(role), "give%d", first);
		trial->pids[0] = start(trial->device, role, pair[0], out[1]);
		(void)snprintf(role, sizeof(role), "take%d", first);
		trial->pids[1] = start(trial->device, role, pair[1], out[1]);
		(void)close(out[1]);
		trial->lines = out[0];
	}
	(void)close(pair[0]);
	(void)close(pair[1]);
}

/* All that the taker writes, until both have ended or it is late. Return: whether they ended by themselves. */
static bool read_lines(struct gpu_trial *trial, char *text, size_t size)
{
	struct pollfd ready = {.fd = trial->lines, .events = POLLIN};
	size_t n = 0;
	ssize_t got = -1;

	while (trial->lines >= 0 && n < size - 1) {
		uint64_t now = clock_ns();

		if (now >= trial->until_ns ||
		    poll(&ready, 1, (int)((trial->until_ns - now) / NS_PER_MS) + 1) <= 0)
			break;
		got = read(trial->lines, text + n, size - 1 - n);
		if (got <= 0)
			break;
		n += (size_t)got;
	}
	text[n] = '\0';
	return got == 0;
}

/* Return: the signal that one of them ended by; 0: none, or ours. */
static int end(struct gpu_trial *trial, bool by_themselves)
{
	int signal = 0, status;

	for (size_t i = 0; i < sizeof(trial->pids) / sizeof(trial->pids[0]); i++) {
		if (trial->pids[i] <= 0)
			continue;
		if (!by_themselves)
			(void)kill(trial->pids[i], SIGKILL);
		while (waitpid(trial->pids[i], &status, 0) < 0)
			if (errno != EINTR)
				status = 0;
		if (by_themselves && WIFSIGNALED(status))
			signal = WTERMSIG(status);
	}
	if (trial->lines >= 0)
		(void)close(trial->lines);
	return signal;
}

/* The lines from @first on go to @lines. Return: the way that ended the trial; N_WAYS: none did. */
static int collect(struct gpu_trial *trial, int first, char lines[N_WAYS][LINE])
{
	char text[N_WAYS * LINE + 1], *at = text;
	bool by_themselves = read_lines(trial, text, sizeof(text));
	int way = first, signal = end(trial, by_themselves);

	for (char *newline; way < N_WAYS && (newline = strchr(at, '\n')); way++) {
		*newline = '\0';
		(void)snprintf(lines[way], LINE, "%.*s", LINE - 1, at);
		at = newline + 1;
	}
	if (way == N_WAYS || (by_themselves && signal == 0))
		return N_WAYS;
	if (signal)
		(void)snprintf(lines[way], LINE, "a process that tried it ended by signal %d",
			       signal);
	else if (way == BY_DESCRIPTOR)
		(void)snprintf(lines[way], LINE, "it took longer than %d s to try", DEADLINE_S);
	return way;
}

struct gpu_trial *gpu_trial_begin(int device)
{
	struct gpu_trial *trial = calloc(1, sizeof(*trial));

	if (!trial)
		return NULL;
	trial->device = device;
	begin(trial, BY_DESCRIPTOR);
	return trial;
}

/* A way that could not be tried, or not in time, is gone only where it is the last: handles have a deadline of their own. */
void gpu_trial_end(struct gpu_trial *trial, struct gpu_sharing *ret_sharing)
{
	char lines[N_WAYS][LINE] = {"it could not be tried", ""};

	if (trial && collect(trial, BY_DESCRIPTOR, lines) == BY_DESCRIPTOR) {
		begin(trial, BY_HANDLE);
		(void)collect(trial, BY_HANDLE, lines);
	}
	free(trial);
	if (lines[BY_DESCRIPTOR][0])
		(void)snprintf(ret_sharing->no_descriptors, LINE, "%s", lines[BY_DESCRIPTOR]);
	if (lines[BY_HANDLE][0])
		(void)snprintf(ret_sharing->no_handles, LINE, "%s", lines[BY_HANDLE]);
}
