/* SPDX-License-Identifier: MIT */
/*
 * One user's connections, all of which have much to ask: an iteration of the loop has one share for all of them, whether what
 * they ask is read just then or has waited, and none of them waits for ever.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/config.h>
#include <base/connection.h>
#include <base/log.h>
#include <proto/error.h>
#include <proto/frame.h>

#define CONNECTIONS 5
#define REQUESTS    4
#define SHARE_US    100
#define TAKES_NS    (2 * SHARE_US * NS_PER_US)

struct peer {
	struct connection connection;
	int socket;
	uint32_t n_served;
};

static struct peer peers[CONNECTIONS];
static uint64_t last_iteration, n_in_iteration, most_in_iteration;
static uint32_t most_ahead; /* of the one that is served least */

/* Longer than a share. */
static int handle(struct connection *connection, uint32_t id, enum proto_method method,
		  const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct peer *peer = container_of(connection, struct peer, connection);
	uint64_t end = clock_ns() + TAKES_NS;
	uint32_t least = UINT32_MAX;

	(void)method, (void)params, (void)fd, (void)err;
	while (clock_ns() < end)
		;
	n_in_iteration = connection->hub->iteration == last_iteration ? n_in_iteration + 1 : 1;
	last_iteration = connection->hub->iteration;
	if (n_in_iteration > most_in_iteration)
		most_in_iteration = n_in_iteration;
	peer->n_served++;
	for (int i = 0; i < CONNECTIONS; i++)
		if (peers[i].n_served < least)
			least = peers[i].n_served;
	if (peer->n_served - least > most_ahead)
		most_ahead = peer->n_served - least;
	connection_answer(connection, id, PROTO_PING, &(struct proto_empty){0}, -1);
	return 0;
}

static void on_end(struct connection *connection)
{
	(void)connection;
}

static const struct connection_ops ops = {
	.handle = handle, .on_closed = on_end, .on_hangup = on_end};

static void open_peer(struct peer *peer, struct connection_hub *hub, struct account *account)
{
	struct proto_buffer out = {0};
	struct fmha_error err;
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair),
			 0);
	peer->socket = pair[1];
	assert_int_equal(
		connection_open(&peer->connection, hub, pair[0], account, false, &ops, &err), 0);
	for (uint32_t id = 1; id <= REQUESTS; id++) {
		static const union proto_any_params none;

		assert_int_equal(proto_encode_request(&out, id, PROTO_PING, &none, &err), 0);
	}
	assert_int_equal(send(peer->socket, out.data, out.size, 0), out.size);
	proto_buffer_deinit(&out);
}

static void connections_of_a_user_share_an_iteration(void **state)
{
	static struct connection_hub hub;
	static struct accounts accounts;
	static struct limits limits;
	struct account *account;
	struct fmha_error err;
	struct config config;
	uv_loop_t loop;

	(void)state;
	log_init("test", LOG_LEVEL_ERROR);
	config_init(&config);
	memcpy(limits.value, config.limits, sizeof(config.limits));
	limits.value[LIMIT_WAKE_US] = SHARE_US;
	uv_loop_init(&loop);
	limits_resolve(&limits, UINT64_C(1) << 30, false);
	accounts_init(&accounts, &limits);
	account = account_get(&accounts, 1000);
	assert_int_equal(connection_hub_init(&hub, &loop, &limits, &err), 0);
	for (int i = 0; i < CONNECTIONS; i++)
		open_peer(&peers[i], &hub, account);
	for (int i = 0; i < 2 * CONNECTIONS * REQUESTS; i++)
		uv_run(&loop, UV_RUN_NOWAIT);
	for (int i = 0; i < CONNECTIONS; i++)
		assert_int_equal(peers[i].n_served, REQUESTS);
	assert_int_equal(most_in_iteration, 1);
	assert_true(most_ahead <= 2); /* the first to be read is the first to wait, too */
	for (int i = 0; i < CONNECTIONS; i++) {
		connection_close(&peers[i].connection);
		close(peers[i].socket);
	}
	uv_run(&loop, UV_RUN_NOWAIT);
	account_put(account);
	connection_hub_deinit(&hub);
	uv_run(&loop, UV_RUN_DEFAULT);
	assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(connections_of_a_user_share_an_iteration),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
