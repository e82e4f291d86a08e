/* SPDX-License-Identifier: MIT */
/* Whose turn it is: shares by user and session, weights, newcomers, and how long anybody waits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include <base/fair.h>

#define MAX_SESSIONS 128

/* Sessions and what each has had. */
struct queue {
	struct fair fair;
	uint32_t n;
	struct fair_session sessions[MAX_SESSIONS];
	uint64_t had_ns[MAX_SESSIONS];
};

static void queue_init(struct queue *queue, uint64_t user_round_ns, uint64_t session_round_ns)
{
	*queue = (struct queue){0};
	fair_init(&queue->fair, user_round_ns, session_round_ns);
}

static void queue_deinit(struct queue *queue)
{
	for (uint32_t i = 0; i < queue->n; i++)
		fair_session_deinit(&queue->sessions[i]);
	assert_null(fair_next(&queue->fair));
	fair_deinit(&queue->fair);
}

/* Returns the first of @n new sessions. */
static uint32_t add(struct queue *queue, uint32_t uid, uint32_t weight, uint32_t n)
{
	uint32_t first = queue->n;

	for (; n > 0; n--, queue->n++)
		assert_int_equal(
			fair_session_init(&queue->fair, uid, weight, &queue->sessions[queue->n]),
			0);
	return first;
}

static void activate_all(struct queue *queue)
{
	for (uint32_t i = 0; i < queue->n; i++)
		fair_activate(&queue->sessions[i]);
}

/* The next one works for @ns; returns which it was. */
static uint32_t turn(struct queue *queue, uint64_t ns)
{
	struct fair_session *session = fair_next(&queue->fair);
	uint32_t i;

	assert_non_null(session);
	i = (uint32_t)(session - queue->sessions);
	fair_charge(session, (int64_t)ns);
	queue->had_ns[i] += ns;
	return i;
}

static uint64_t had(const struct queue *queue, uint32_t first, uint32_t n)
{
	uint64_t sum = 0;

	while (n-- > 0)
		sum += queue->had_ns[first++];
	return sum;
}

static void nobody_is_next_when_nobody_is_active(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	assert_null(fair_next(&queue.fair));
	add(&queue, 1, 1, 1);
	assert_null(fair_next(&queue.fair));
	fair_activate(&queue.sessions[0]);
	fair_activate(&queue.sessions[0]);
	assert_ptr_equal(fair_next(&queue.fair), &queue.sessions[0]);
	assert_ptr_equal(fair_next(&queue.fair), &queue.sessions[0]);
	fair_deactivate(&queue.sessions[0]);
	fair_deactivate(&queue.sessions[0]);
	assert_null(fair_next(&queue.fair));
	queue_deinit(&queue);
}

/* 100 sessions of one user against one of another: 1,000 turns of 10 ns, half for each user, and
 * 50 ns for each of the hundred. */
static void sessions_do_not_add_up(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 100);
	add(&queue, 2, 1, 1);
	activate_all(&queue);
	for (int i = 0; i < 1000; i++)
		turn(&queue, 10);
	assert_int_equal(had(&queue, 0, 100), 5000);
	assert_int_equal(queue.had_ns[100], 5000);
	for (uint32_t i = 0; i < 100; i++)
		assert_int_equal(queue.had_ns[i], 50);
	queue_deinit(&queue);
}

/* Turns of very different length: 7 ns of one user against 1,000 of the other; what they have had
 * is never further apart than the longest turn. */
static void users_are_held_equal_by_work_not_by_turns(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 3);
	add(&queue, 2, 1, 1);
	activate_all(&queue);
	for (int i = 0; i < 5000; i++) {
		int64_t apart;

		turn(&queue, fair_next(&queue.fair) == &queue.sessions[3] ? 7 : 1000);
		apart = (int64_t)had(&queue, 0, 3) - (int64_t)queue.had_ns[3];
		assert_in_range(apart + 1000, 0, 2000);
	}
	queue_deinit(&queue);
}

/* Weights 4, 1 and 3 of 8: of 8,000 ns 4,000, 1,000 and 3,000; a user's weight is not multiplied by
 * its sessions. */
static void work_is_shared_by_weight(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 4, 1);
	add(&queue, 2, 1, 5);
	add(&queue, 3, 3, 2);
	activate_all(&queue);
	for (int i = 0; i < 667; i++)
		turn(&queue, 12);
	assert_in_range(had(&queue, 0, 1), 3988, 4012);
	assert_in_range(had(&queue, 1, 5), 988, 1012);
	assert_in_range(had(&queue, 6, 2), 2988, 3012);
	queue_deinit(&queue);
}

/* Who comes late has no claim to what the others had before, and is next at once. */
static void newcomers_start_where_the_others_are(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 1);
	add(&queue, 2, 1, 1);
	fair_activate(&queue.sessions[0]);
	for (int i = 0; i < 1000; i++)
		turn(&queue, 10);
	fair_activate(&queue.sessions[1]);
	assert_int_equal(turn(&queue, 10), 1);
	for (int i = 0; i < 99; i++)
		turn(&queue, 10);
	assert_in_range(queue.had_ns[1], 490, 510);
	queue_deinit(&queue);
}

/* One user runs for 1 s while nobody else wants to, then another one, then both: the first is not
 * made to wait for what it had alone. */
static void work_that_nobody_waited_for_is_forgotten(void **state)
{
	struct queue queue;
	uint64_t before[2];

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 1);
	add(&queue, 2, 1, 1);
	fair_activate(&queue.sessions[0]);
	turn(&queue, 1000000000);
	fair_deactivate(&queue.sessions[0]);
	fair_activate(&queue.sessions[1]);
	for (int i = 0; i < 10; i++)
		turn(&queue, 10);
	fair_activate(&queue.sessions[0]);
	for (int i = 0; i < 2; i++)
		before[i] = queue.had_ns[i];
	for (int i = 0; i < 100; i++)
		turn(&queue, 10);
	assert_in_range(queue.had_ns[0] - before[0], 490, 510);
	assert_in_range(queue.had_ns[1] - before[1], 490, 510);
	queue_deinit(&queue);
}

/*
 * A light user asks for 1 ns now and then, among 20 users with 5 sessions each that always have
 * work in turns of a round: it is next, but for the 1 % of times when its own nanoseconds have just
 * filled a round.
 */
static void a_light_user_is_next(void **state)
{
	struct queue queue;
	uint32_t n_next = 0;

	(void)state;
	queue_init(&queue, 100, 1000);
	for (uint32_t uid = 1; uid <= 20; uid++)
		add(&queue, uid, 1, 5);
	activate_all(&queue);
	add(&queue, 99, 1, 1);
	for (int i = 0; i < 10000; i++) {
		uint32_t waited = 0;

		for (int busy = 0; busy < i % 7; busy++)
			turn(&queue, 100);
		fair_activate(&queue.sessions[100]);
		while (turn(&queue, fair_next(&queue.fair) == &queue.sessions[100] ? 1 : 100) !=
		       100)
			waited++;
		n_next += waited == 0;
		assert_in_range(waited, 0, 20);
		fair_deactivate(&queue.sessions[100]);
	}
	assert_in_range(n_next, 9900, 10000);
	queue_deinit(&queue);
}

/* Nobody waits for ever, whatever comes and goes: of 10 users, nine of which leave and return after
 * each turn, the tenth gets its tenth. */
static void coming_and_going_starves_nobody(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	for (uint32_t uid = 0; uid < 10; uid++)
		add(&queue, uid, 1, 1);
	activate_all(&queue);
	for (int i = 0; i < 10000; i++) {
		uint32_t who = turn(&queue, 10);

		if (who == 9)
			continue;
		fair_deactivate(&queue.sessions[who]);
		fair_activate(&queue.sessions[who]);
	}
	for (uint32_t i = 0; i < 10; i++)
		assert_in_range(queue.had_ns[i], 9900, 10100);
	queue_deinit(&queue);
}

/* Nor is it worth while to hang up and come back. */
static void a_user_is_remembered_while_it_is_ahead(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 2);
	add(&queue, 2, 1, 1);
	fair_activate(&queue.sessions[0]);
	fair_activate(&queue.sessions[2]);
	assert_int_equal(turn(&queue, 10), 2);
	assert_int_equal(turn(&queue, 1000), 0);
	fair_session_deinit(&queue.sessions[0]);
	fair_session_deinit(&queue.sessions[1]);
	assert_int_equal(fair_session_init(&queue.fair, 1, 1, &queue.sessions[0]), 0);
	fair_activate(&queue.sessions[0]);
	for (int i = 0; i < 99; i++)
		assert_int_equal(turn(&queue, 10), 2);
	queue_deinit(&queue);
}

/* Rounds of 100 ns, turns of 10: a session is served ten times in a row, the last one of a round
 * twenty times, and all get the same. */
static void sessions_of_a_user_take_turns_by_rounds(void **state)
{
	struct queue queue;
	uint32_t last, changes = 0;

	(void)state;
	queue_init(&queue, 1, 100);
	add(&queue, 1, 1, 4);
	activate_all(&queue);
	last = turn(&queue, 10);
	for (int i = 1; i < 4000; i++) {
		uint32_t who = turn(&queue, 10);

		changes += who != last;
		last = who;
	}
	assert_int_equal(changes, 300);
	for (uint32_t i = 0; i < 4; i++)
		assert_int_equal(queue.had_ns[i], 10000);
	queue_deinit(&queue);
}

/* In the middle of another one's round. */
static void a_new_session_of_a_user_is_next(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1000);
	add(&queue, 1, 1, 3);
	fair_activate(&queue.sessions[0]);
	fair_activate(&queue.sessions[1]);
	for (int i = 0; i < 1234; i++)
		turn(&queue, 10);
	fair_activate(&queue.sessions[2]);
	assert_int_equal(turn(&queue, 10), 2);
	queue_deinit(&queue);
}

/* An estimate of 1,000 that turns out to be 200 counts as 200, and the other way round. */
static void estimates_are_corrected(void **state)
{
	struct queue queue;

	(void)state;
	queue_init(&queue, 1, 1);
	add(&queue, 1, 1, 1);
	add(&queue, 2, 2, 1);
	activate_all(&queue);
	for (int i = 0; i < 3000; i++) {
		struct fair_session *session = fair_next(&queue.fair);
		int64_t estimate = i % 2 ? 1000 : 10;

		fair_charge(session, estimate);
		fair_charge(session, 200 - estimate);
		queue.had_ns[session - queue.sessions] += 200;
	}
	assert_in_range(queue.had_ns[0], 199600, 200400);
	assert_in_range(queue.had_ns[1], 399600, 400400);
	fair_charge(&queue.sessions[0], INT64_MIN / 2); /* stops at 0 */
	assert_int_equal(turn(&queue, 1), 0);
	queue_deinit(&queue);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(nobody_is_next_when_nobody_is_active),
		cmocka_unit_test(sessions_do_not_add_up),
		cmocka_unit_test(users_are_held_equal_by_work_not_by_turns),
		cmocka_unit_test(work_is_shared_by_weight),
		cmocka_unit_test(newcomers_start_where_the_others_are),
		cmocka_unit_test(work_that_nobody_waited_for_is_forgotten),
		cmocka_unit_test(a_light_user_is_next),
		cmocka_unit_test(coming_and_going_starves_nobody),
		cmocka_unit_test(a_user_is_remembered_while_it_is_ahead),
		cmocka_unit_test(sessions_of_a_user_take_turns_by_rounds),
		cmocka_unit_test(a_new_session_of_a_user_is_next),
		cmocka_unit_test(estimates_are_corrected),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
