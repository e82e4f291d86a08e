/* SPDX-License-Identifier: MIT */
#include <base/spinner.h>

#include <sched.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/list.h>

/* At half a microsecond each the others wait for 4 us at most. */
#define LOOKS_A_TURN 8

void spinner_init(struct spinner *spinner, uv_loop_t *loop, uint64_t window_us,
		  bool (*look)(struct spinner *spinner))
{
	*spinner = (struct spinner){.look = look};
	proto_spin_init(&spinner->rules, window_us, sysconf(_SC_NPROCESSORS_ONLN));
	uv_idle_init(loop, &spinner->turn);
}

void spinner_deinit(struct spinner *spinner)
{
	uv_close((uv_handle_t *)&spinner->turn, NULL);
}

static bool is_free(const struct spinner *spinner)
{
	return !spinner->is_free || spinner->is_free(spinner->owner);
}

/* Once a turn, before the loop looks at its sockets; while it is active the loop does not block. */
static void on_turn(uv_idle_t *turn)
{
	struct spinner *spinner = container_of(turn, struct spinner, turn);

	for (int i = 0; i < LOOKS_A_TURN; i++) {
		/* First of all: the peer may be waiting for this core. */
		(void)sched_yield();
		if (spinner->look(spinner))
			return;
		if (!is_free(spinner) ||
		    !proto_spin_go_on(&spinner->rules, spinner->quiet_since_ns, clock_ns())) {
			uv_idle_stop(turn);
			return;
		}
	}
}

void spinner_arrival(struct spinner *spinner, uint64_t now)
{
	if (spinner->quiet_since_ns)
		proto_spin_waited(&spinner->rules, now - spinner->quiet_since_ns);
}

void spinner_rest(struct spinner *spinner)
{
	spinner->quiet_since_ns = clock_ns();
	if (!proto_spin_begin(&spinner->rules, spinner->quiet_since_ns))
		uv_idle_stop(&spinner->turn);
	else if (is_free(spinner))
		uv_idle_start(&spinner->turn, on_turn);
}
