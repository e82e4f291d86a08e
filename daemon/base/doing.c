/* SPDX-License-Identifier: MIT */
#include <base/doing.h>

#include <stddef.h>

#include <proto/message.h>

const char *doing_name(uint64_t word)
{
	uint64_t what = word >> 32;

	if (what == 0 || what > N_DOING)
		return NULL;
	switch (what - 1) {
	case DOING_HANGUP:
		return "the end of a connection";
	case DOING_CHORE:
		return "an answer in slices";
	case DOING_COMPLETION:
		return "the end of a run or call";
	default:
		return proto_methods[what - 1].name;
	}
}
