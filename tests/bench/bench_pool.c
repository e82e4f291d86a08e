/* SPDX-License-Identifier: MIT */
/*
 * What asking a pool costs, beside a ping to the same process in the same run: looking up a long prefix, and leasing
 * and freeing pages, by the token.
 *
 *   bench_pool SOCKET        a running fmhad
 *
 * Measurements take turns, and each figure is the median of the round that had the best one: on a shared machine noise
 * only ever adds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <fmha/fmha.h>

#define N_ROUNDS    7
#define N_TRIPS     1000
#define N_PAGES     16384
#define N_KEYS      1000
#define N_LEASED    32
#define PAGE_TOKENS 16

static void check(int r, const char *what, const struct fmha_error *err)
{
	if (r == 0)
		return;
	(void)fprintf(stderr, "bench_pool: %s: %s\n", what, err->msg);
	exit(1);
}

static double now_us(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void keep_best(double *best, double times[N_TRIPS])
{
	qsort(times, N_TRIPS, sizeof(*times), compare_doubles);
	if (*best == 0 || times[N_TRIPS / 2] < *best)
		*best = times[N_TRIPS / 2];
}

static uint8_t keys[N_PAGES][FMHA_POOL_KEY_BYTES];
static uint32_t pages[N_PAGES], found[N_KEYS];

/* A pool whose pages are sealed but for some. */
static struct fmha_pool *full_pool(struct fmha_client *client)
{
	struct fmha_pool_options options = {.struct_size = sizeof(options),
					    .name = "bench",
					    .n_pages = N_PAGES,
					    .page_bytes = 4096};
	struct fmha_pool *pool;
	struct fmha_error err;
	uint32_t n, sealed = N_PAGES - N_KEYS;
	uint64_t word = 88172645463325252;

	for (size_t i = 0; i < sizeof(keys); i++) {
		word ^= word << 13;
		word ^= word >> 7;
		word ^= word << 17;
		keys[i / FMHA_POOL_KEY_BYTES][i % FMHA_POOL_KEY_BYTES] = (uint8_t)word;
	}
	check(fmha_pool_open(client, &options, &pool, &err), "open", &err);
	check(fmha_pool_lease(pool, sealed, pages, &n, &err), "lease", &err);
	check(fmha_pool_seal(pool, n, pages, (const uint8_t(*)[FMHA_POOL_KEY_BYTES])keys, pages,
			     &err),
	      "seal", &err);
	check(fmha_pool_give_back(pool, n, pages, &err), "give back", &err);
	return pool;
}

struct figures {
	double ping, find, find_one, drop, lease;
};

static void measure(struct fmha_client *client, struct fmha_pool *pool, struct figures *best)
{
	static double ping[N_TRIPS], find[N_TRIPS], find_one[N_TRIPS], drop[N_TRIPS],
		lease[N_TRIPS];
	struct fmha_error err;
	double begin, middle;
	uint32_t n;

	for (int i = 0; i < N_TRIPS; i++) {
		begin = now_us();
		check(fmha_client_ping(client, &err), "ping", &err);
		ping[i] = now_us() - begin;
	}
	for (int i = 0; i < N_TRIPS; i++) {
		uint32_t at = (uint32_t)i * 997u % (N_PAGES - 2 * N_KEYS);

		begin = now_us();
		check(fmha_pool_find(pool, N_KEYS, (const uint8_t(*)[FMHA_POOL_KEY_BYTES])keys[at],
				     found, &n, &err),
		      "find", &err);
		middle = now_us();
		if (n != N_KEYS)
			check(-1, "fewer pages than were sealed", &err);
		check(fmha_pool_give_back(pool, N_KEYS, found, &err), "give back", &err);
		drop[i] = now_us() - middle;
		find[i] = middle - begin;
	}
	for (int i = 0; i < N_TRIPS; i++) {
		begin = now_us();
		check(fmha_pool_find(pool, 1, (const uint8_t(*)[FMHA_POOL_KEY_BYTES])keys[i], found,
				     &n, &err),
		      "find", &err);
		find_one[i] = now_us() - begin;
		check(fmha_pool_give_back(pool, 1, found, &err), "give back", &err);
	}
	for (int i = 0; i < N_TRIPS; i++) {
		begin = now_us();
		check(fmha_pool_lease(pool, N_LEASED, found, &n, &err), "lease", &err);
		check(fmha_pool_give_back(pool, N_LEASED, found, &err), "give back", &err);
		lease[i] = now_us() - begin;
	}
	keep_best(&best->ping, ping);
	keep_best(&best->find, find);
	keep_best(&best->find_one, find_one);
	keep_best(&best->drop, drop);
	keep_best(&best->lease, lease);
}

static void row(const char *what, double us, const struct figures *f, const char *wanted)
{
	(void)printf("%-52s %9.2f %9.2f  %s\n", what, us, us / f->ping, wanted);
}

int main(int argc, char **argv)
{
	struct fmha_client_options options = {.struct_size = sizeof(options), .path = argv[1]};
	struct fmha_client *client;
	struct figures f = {0};
	struct fmha_error err;
	struct fmha_pool *pool;

	if (argc != 2) {
		(void)fputs("usage: bench_pool SOCKET\n", stderr);
		return 2;
	}
	check(fmha_connect(&options, &client, &err), "connect", &err);
	pool = full_pool(client);
	for (int i = 0; i < N_ROUNDS; i++)
		measure(client, pool, &f);
	(void)printf("%-52s %9s %9s  %s\n", "best of 7 rounds, medians of 1000", "us", "of a ping",
		     "wanted");
	row("ping", f.ping, &f, "");
	row("a look-up of 1 hash", f.find_one, &f, "");
	row("a look-up of 1,000 hashes", f.find, &f, f.find <= 50 ? "50 us" : "50 us: MISSED");
	row("giving 1,000 pages back", f.drop, &f, "");
	row("leasing 32 pages and giving them back", f.lease, &f, "");
	row("    that for each of their 512 tokens", f.lease / (N_LEASED * PAGE_TOKENS), &f,
	    f.lease <= N_LEASED * PAGE_TOKENS ? "1 us" : "1 us: MISSED");
	pool = fmha_pool_close(pool);
	check(fmha_pool_drop(client, "bench", &err), "drop", &err);
	(void)fmha_client_free(client);
	return 0;
}
