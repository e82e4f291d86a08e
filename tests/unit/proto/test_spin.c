/* SPDX-License-Identifier: MIT */
/* When a wait is spun, how long, and when spinning stops paying. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <proto/spin.h>

#define US 1000u

/* With a window of 50 us and as many short waits behind it as it takes. */
static struct proto_spin keen(void)
{
	struct proto_spin spin;

	proto_spin_init(&spin, 50, 2);
	for (int i = 0; i < PROTO_SPIN_STREAK; i++)
		proto_spin_waited(&spin, 10 * US);
	return spin;
}

static void only_short_waits_in_a_row_lead_to_spinning(void **state)
{
	struct proto_spin spin;

	(void)state;
	proto_spin_init(&spin, 50, 2);
	for (int i = 0; i < PROTO_SPIN_STREAK; i++) {
		assert_false(proto_spin_begin(&spin, 1000));
		proto_spin_waited(&spin, 50 * US);
	}
	assert_true(proto_spin_begin(&spin, 1000));
	proto_spin_waited(&spin, 51 * US);
	for (int i = 0; i < PROTO_SPIN_STREAK; i++) {
		assert_false(proto_spin_begin(&spin, 1000));
		proto_spin_waited(&spin, 0);
	}
	assert_true(proto_spin_begin(&spin, 1000));
}

static void a_wait_is_spun_for_one_window(void **state)
{
	struct proto_spin spin = keen();
	uint64_t began = 1000000, now;

	(void)state;
	assert_true(proto_spin_begin(&spin, began));
	for (now = began + US; now < began + 50 * US; now += US)
		assert_true(proto_spin_go_on(&spin, began, now));
	assert_false(proto_spin_go_on(&spin, began, now));
	proto_spin_waited(&spin, now - began + US);
	assert_false(proto_spin_begin(&spin, now + US));
}

static void one_core_or_no_window_never_spins(void **state)
{
	struct proto_spin one_core, no_window;

	(void)state;
	proto_spin_init(&one_core, 50, 1);
	proto_spin_init(&no_window, 0, 64);
	for (int i = 0; i < 100; i++) {
		proto_spin_waited(&one_core, 0);
		proto_spin_waited(&no_window, 0);
		assert_false(proto_spin_begin(&one_core, 1000));
		assert_false(proto_spin_begin(&no_window, 1000));
	}
}

/* A look so late that somebody else must have had the core. Return: when spinning is back. */
static uint64_t lose_core(struct proto_spin *spin, uint64_t now)
{
	uint64_t late = now + PROTO_SPIN_LATE_NS + 1, pause;

	assert_true(proto_spin_begin(spin, now));
	assert_false(proto_spin_go_on(spin, now, late));
	for (pause = US; !proto_spin_begin(spin, late + pause); pause *= 2)
		assert_true(pause < 4ull * PROTO_SPIN_PAUSE_MAX_NS);
	return late + pause;
}

static void a_wanted_core_is_left_alone_longer_each_time(void **state)
{
	struct proto_spin spin = keen();
	uint64_t now = 1ull << 40, back = lose_core(&spin, now), pause = back - now;

	(void)state;
	assert_true(pause >= PROTO_SPIN_PAUSE_NS && pause < 3 * PROTO_SPIN_PAUSE_NS);
	for (int i = 0; i < 12; i++)
		back = lose_core(&spin, now = back);
	assert_true(back - now >= PROTO_SPIN_PAUSE_MAX_NS);
	/* After a good while without, the next is the first again. */
	now = back + 2ull * PROTO_SPIN_PAUSE_MAX_NS;
	assert_true(lose_core(&spin, now) - now < 3 * PROTO_SPIN_PAUSE_NS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(only_short_waits_in_a_row_lead_to_spinning),
		cmocka_unit_test(a_wait_is_spun_for_one_window),
		cmocka_unit_test(one_core_or_no_window_never_spins),
		cmocka_unit_test(a_wanted_core_is_left_alone_longer_each_time),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
