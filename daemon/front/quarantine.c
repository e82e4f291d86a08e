/* SPDX-License-Identifier: MIT */
#include "quarantine.h"

#include <stdio.h>
#include <string.h>

#include <base/clock.h>
#include <proto/fnv.h>
#include <base/log.h>

#define LONGEST_NS (86400 * NS_PER_S)

void quarantine_init(struct quarantine *quarantine, const struct config_supervision *rules)
{
	memset(quarantine, 0, sizeof(*quarantine));
	quarantine->n_deaths = rules->quarantine_deaths;
	quarantine->period_ns = rules->quarantine_s * NS_PER_S;
}

bool quarantine_is_active(const struct quarantine_entry *entry, uint64_t now)
{
	return entry->n_times > 0 && now < entry->what.until_ns;
}

/* Of the code that has it; of a kernel whose code nobody knows, of its name. */
static uint64_t identity(uint64_t code, const char *kernel)
{
	return code ? code : fnv_text(FNV_START, kernel);
}

/* ---- counting ---- */

#define NO_KERNEL FNV_START /* identity(0, "") */

struct tally {
	uint32_t n_of_kernel, n_of_user, n_of_both, n_of_requests;
	bool several_users; /* had a part in the kernel's */
};

static struct tally count(const struct quarantine *quarantine, const struct quarantine_death *last)
{
	struct tally tally = {0};

	for (uint32_t i = 0; i < QUARANTINE_DEATHS; i++) {
		const struct quarantine_death *death = &quarantine->deaths[i];
		bool same_kernel = death->code == last->code && death->device == last->device;
		bool same_user = death->uid == last->uid;

		if (!death->code || last->when_ns - death->when_ns > quarantine->period_ns)
			continue;
		tally.n_of_kernel += same_kernel;
		tally.n_of_user += same_user;
		tally.n_of_both += same_kernel && same_user;
		tally.n_of_requests += same_user && death->code == NO_KERNEL;
		tally.several_users |= same_kernel && !same_user;
	}
	return tally;
}

/* ---- entries ---- */

static bool is_for(const struct quarantine_entry *entry, const struct worker_death *death,
		   const char *kernel, bool everybody)
{
	return entry->n_times > 0 && !*entry->what.kernel == !*kernel &&
	       identity(entry->what.code, entry->what.kernel) ==
		       identity(*kernel ? death->code : 0, kernel) &&
	       entry->what.everybody == everybody && (everybody || entry->what.uid == death->uid) &&
	       (!*kernel || entry->device == death->device);
}

/* How much it matters that the entry is kept. */
static int rank(const struct quarantine_entry *entry, uint64_t now)
{
	if (!quarantine_is_active(entry, now))
		return 0;
	return entry->what.everybody ? 2 : 1;
}

/* The same as before, else the one that matters least and ends first. */
static struct quarantine_entry *choose_entry(struct quarantine *quarantine,
					     const struct worker_death *death, const char *kernel,
					     bool everybody, uint64_t now)
{
	struct quarantine_entry *chosen = &quarantine->entries[0];

	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
		struct quarantine_entry *entry = &quarantine->entries[i];
		int more = rank(entry, now) - rank(chosen, now);

		if (is_for(entry, death, kernel, everybody))
			return entry;
		if (more < 0 || (more == 0 && entry->what.until_ns < chosen->what.until_ns))
			chosen = entry;
	}
	*chosen = (struct quarantine_entry){.device = death->device,
					    .what = {.code = *kernel ? death->code : 0,
						     .everybody = everybody,
						     .uid = death->uid}};
	snprintf(chosen->what.kernel, sizeof(chosen->what.kernel), "%s", kernel);
	return chosen;
}

/* Return: for how many seconds, or 0 when it is so already. */
static uint32_t confine(struct quarantine *quarantine, const struct worker_death *death,
			const char *kernel, bool everybody, uint64_t now)
{
	struct quarantine_entry *entry = choose_entry(quarantine, death, kernel, everybody, now);
	uint64_t period = quarantine->period_ns;

	entry->problem = death->problem;
	if (quarantine_is_active(entry, now))
		return 0;
	for (uint32_t i = 0; i < entry->n_times && period < LONGEST_NS; i++)
		period *= 2;
	if (period > LONGEST_NS)
		period = LONGEST_NS;
	entry->n_times++;
	entry->what.until_ns = now + period;
	return (uint32_t)(period / NS_PER_S);
}

bool quarantine_add(struct quarantine *quarantine, const struct worker_death *death, uint64_t now)
{
	struct quarantine_death *last = &quarantine->deaths[quarantine->next];
	struct log_about about;
	struct tally tally;
	bool everybody, changed = false;
	uint32_t seconds;

	if (!*death->kernel && !death->during)
		return false;
	quarantine->next = (quarantine->next + 1) % QUARANTINE_DEATHS;
	*last = (struct quarantine_death){.when_ns = now,
					  .code = identity(death->code, death->kernel),
					  .problem = death->problem,
					  .device = death->device,
					  .uid = death->uid};
	tally = count(quarantine, last);
	everybody = tally.several_users || death->trusted;
	about = (struct log_about){.fields = LOG_DEVICE | (everybody ? 0 : LOG_UID),
				   .device = death->device,
				   .uid = death->uid,
				   .kernel = death->kernel};
	if (*death->kernel &&
	    (everybody ? tally.n_of_kernel : tally.n_of_both) >= quarantine->n_deaths) {
		seconds = confine(quarantine, death, death->kernel, everybody, now);
		changed |= seconds > 0;
		if (seconds > 0 && everybody)
			log_write_about(&about, LOG_LEVEL_ERROR,
					"device %u: kernel %s has ended %u workers and is not used "
					"for %u s",
					death->device, death->kernel, tally.n_of_kernel, seconds);
		else if (seconds > 0)
			log_write_about(&about, LOG_LEVEL_ERROR,
					"device %u: kernel %s has ended %u workers for user %u "
					"(problem %016llx) and is not used for that user for %u s",
					death->device, death->kernel, tally.n_of_both, death->uid,
					(unsigned long long)death->problem, seconds);
	}
	if (death->trusted || (tally.n_of_user < 2 * quarantine->n_deaths &&
			       tally.n_of_requests < quarantine->n_deaths))
		return changed;
	seconds = confine(quarantine, death, "", false, now);
	if (seconds > 0)
		log_write_about(&(struct log_about){.fields = LOG_UID, .uid = death->uid},
				LOG_LEVEL_ERROR,
				"user %u has ended %u workers, the last by %s, and may open no "
				"device for %u s",
				death->uid, tally.n_of_user,
				*death->kernel ? death->kernel : death->during, seconds);
	return changed || seconds > 0;
}

void quarantine_restore(struct quarantine *quarantine, uint32_t device,
			const struct worker_quarantined *what, uint64_t now)
{
	struct worker_death death = {
		.device = device, .kernel = what->kernel, .code = what->code, .uid = what->uid};
	struct quarantine_entry *entry = choose_entry(quarantine, &death, what->kernel,
						      what->everybody, now);

	if (quarantine_is_active(entry, now))
		return;
	entry->what.until_ns = what->until_ns;
	entry->n_times++;
}

static const struct quarantine_entry *entry_of(const struct quarantine *quarantine, uint32_t device,
					       const char *kernel)
{
	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
		const struct quarantine_entry *entry = &quarantine->entries[i];

		if (entry->n_times > 0 && entry->device == device && *kernel &&
		    strcmp(entry->what.kernel, kernel) == 0)
			return entry;
	}
	return NULL;
}

uint32_t quarantine_lift(struct quarantine *quarantine, uint32_t device, const char *kernel)
{
	const struct quarantine_entry *named = entry_of(quarantine, device, kernel);
	uint64_t code = named ? identity(named->what.code, kernel) : 0;
	uint32_t n = 0;

	if (!named)
		return 0;
	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
		struct quarantine_entry *entry = &quarantine->entries[i];

		if (entry->n_times == 0 || entry->device != device || !*entry->what.kernel ||
		    identity(entry->what.code, entry->what.kernel) != code)
			continue;
		entry->n_times = 0;
		n++;
	}
	for (uint32_t i = 0; i < QUARANTINE_DEATHS; i++)
		if (quarantine->deaths[i].code == code && quarantine->deaths[i].device == device)
			quarantine->deaths[i].code = 0;
	return n;
}

/* ---- asking ---- */

uint32_t quarantine_ban_s(const struct quarantine *quarantine, uint32_t uid, uint64_t now)
{
	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
		const struct quarantine_entry *entry = &quarantine->entries[i];

		if (quarantine_is_active(entry, now) && !entry->what.kernel[0] &&
		    entry->what.uid == uid)
			return (uint32_t)((entry->what.until_ns - now) / NS_PER_S) + 1;
	}
	return 0;
}

void quarantine_list(const struct quarantine *quarantine, uint32_t device, uint64_t now,
		     struct worker_quarantine *ret_what)
{
	*ret_what = (struct worker_quarantine){0};
	/* If there are too many, those that concern everybody matter most. */
	for (int everybody = 1; everybody >= 0; everybody--)
		for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
			const struct quarantine_entry *entry = &quarantine->entries[i];

			if (quarantine_is_active(entry, now) && entry->what.kernel[0] &&
			    entry->device == device && entry->what.everybody == everybody &&
			    ret_what->n < WORKER_MAX_QUARANTINED)
				ret_what->list[ret_what->n++] = entry->what;
		}
}
