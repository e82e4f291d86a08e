/* SPDX-License-Identifier: MIT */
#include <base/doing.h>

#include <stddef.h>
#include <time.h>

#include <base/clock.h>
#include <proto/message.h>

const char *doing_name(uint64_t word)
{
	uint64_t what = word >> 32;

	if (what == 0 || what > N_DOING)
		return NULL;
	switch (what - 1) {
	case DOING_HANGUP:
		return "the end of a connection";
	case DOING_COMPLETION:
		return "the end of a run or call";
	default:
		return proto_methods[what - 1].name;
	}
}

uint64_t doing_cpu_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

void doing_count(struct doing *doing, const struct doing_before *before)
{
	uint64_t what = atomic_load_explicit(&doing->word, memory_order_relaxed) >> 32;
	uint64_t ns = doing_cpu_ns() - before->cpu_ns;
	struct doing_cost *cost;

	if (what == 0 || what > N_DOING || before->cpu_ns == 0)
		return;
	cost = &doing->costs[what - 1];
	cost->n++;
	cost->cpu_ns += ns;
	if (ns > cost->longest_ns)
		cost->longest_ns = ns;
}
