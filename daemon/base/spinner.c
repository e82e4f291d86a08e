/* SPDX-License-Identifier: MIT */
#include <base/spinner.h>

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/list.h>

/* At half a microsecond each the others wait for 4 us at most. */
#define LOOKS_A_TURN 8

/* Reading the load takes 2 us: this often that is nothing. */
#define LOAD_READ_NS (10 * NS_PER_MS)

/* Once a turn, before the loop looks at its sockets. */
static void on_turn(uv_idle_t *turn)
{
	struct spin *spin = container_of(turn, struct spin, turn);

	for (int i = 0; i < LOOKS_A_TURN; i++) {
		/* First of all: the peer may be waiting for this core. */
		(void)sched_yield();
		if (spin->look(spin))
			return;
		if (spin->goes_on(spin, clock_ns()))
			continue;
		uv_idle_stop(turn);
		if (spin->on_end)
			spin->on_end(spin);
		return;
	}
}

void spin_start(struct spin *spin)
{
	uv_idle_start(&spin->turn, on_turn);
}

/* ---- for requests ---- */

/* Whether more threads want to run now than there are cores, us and the peer included. */
static bool is_crowded(struct spinner *spinner, uint64_t now)
{
	char text[96];
	const char *at = text;
	ssize_t n;

	if (spinner->load_fd < 0 || now - spinner->load_read_ns < LOAD_READ_NS)
		return spinner->crowded;
	spinner->load_read_ns = now;
	n = pread(spinner->load_fd, text, sizeof(text) - 1, 0);
	text[n > 0 ? n : 0] = '\0';
	/* "0.20 0.18 0.12 RUNNING/ALL LAST" */
	for (int i = 0; i < 3 && at; i++) {
		at = strchr(at, ' ');
		at = at ? at + 1 : NULL;
	}
	spinner->crowded = at && strtol(at, NULL, 10) > spinner->n_cores;
	return spinner->crowded;
}

bool spinner_is_crowded(struct spinner *spinner)
{
	return spinner->rules.window_ns == 0 || is_crowded(spinner, clock_ns());
}

static bool is_free(const struct spinner *spinner)
{
	return !spinner->is_free || spinner->is_free(spinner->owner);
}

static bool goes_on(struct spin *spin, uint64_t now)
{
	struct spinner *spinner = container_of(spin, struct spinner, spin);

	return is_free(spinner) && proto_spin_go_on(&spinner->rules, spinner->quiet_since_ns, now);
}

void spinner_init(struct spinner *spinner, uv_loop_t *loop, uint64_t window_us,
		  bool (*look)(struct spin *spin))
{
	*spinner = (struct spinner){.spin = {.look = look, .goes_on = goes_on}, .load_fd = -1};
	spinner->n_cores = sysconf(_SC_NPROCESSORS_ONLN);
	proto_spin_init(&spinner->rules, window_us, spinner->n_cores);
	if (spinner->rules.window_ns > 0)
		spinner->load_fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
	uv_idle_init(loop, &spinner->spin.turn);
}

void spinner_deinit(struct spinner *spinner)
{
	uv_close((uv_handle_t *)&spinner->spin.turn, NULL);
	if (spinner->load_fd >= 0)
		(void)close(spinner->load_fd);
}

void spinner_arrival(struct spinner *spinner, uint64_t now)
{
	if (spinner->quiet_since_ns)
		proto_spin_waited(&spinner->rules, now - spinner->quiet_since_ns);
}

void spinner_rest(struct spinner *spinner)
{
	spinner->quiet_since_ns = clock_ns();
	if (proto_spin_begin(&spinner->rules, spinner->quiet_since_ns) && is_free(spinner) &&
	    !is_crowded(spinner, spinner->quiet_since_ns))
		spin_start(&spinner->spin);
	else
		uv_idle_stop(&spinner->spin.turn);
}
