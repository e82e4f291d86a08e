/* SPDX-License-Identifier: MIT */
/* fmhactl: fmhad's command line. One table of commands; each is a file of its own. */
#include "ctl.h"

#include <stdio.h>
#include <string.h>

static const struct ctl_command commands[] = {
	{"ping", "round trip to the daemon and to each device's worker", ctl_ping},
	{"status", "processes, devices, sessions, buffers, queues, latencies", ctl_status},
	{"devices", "the daemon's devices", ctl_devices},
	{"run", "attention on .npy files: forward, backward, append", ctl_run},
	{"verify", "random problems against the double-precision reference", ctl_verify},
	{"plan", "which kernels a problem gets, and why", ctl_plan},
	{"registry", "a device's kernels: export, import, load, unload", ctl_registry},
	{"archs", "the archs that kernels are known for (no daemon)", ctl_archs},
	{"profiles", "named subsets of kernels (no daemon)", ctl_profiles},
	{"enumerate", "the kernels that an arch can have (no daemon)", ctl_enumerate},
	{"build", "compile an arch's kernels into a cache (no daemon, no GPU)", ctl_build},
	{"validate", "is this kernel spec one that can exist? (no daemon)", ctl_validate},
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(FILE *out)
{
	(void)fputs("usage: fmhactl COMMAND [OPTION...]\n\n", out);
	for (size_t i = 0; i < N_COMMANDS; i++)
		(void)fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
	(void)fputs(
		"\n`fmhactl COMMAND --help` says more. The daemon is looked for at --socket PATH,\n"
		"$FMHAD_SOCKET, $XDG_RUNTIME_DIR/fmhad.sock, /run/fmhad/fmhad.sock.\n\n"
		"exit codes: 0 success, 1 a check failed, 2 usage, 3 daemon unreachable,\n"
		"            4 the daemon refused, 5 a file cannot be read, written or "
		"understood\n",
		out);
}

static int run_command(const struct ctl_command *command, int argc, char **argv)
{
	char title[64];
	int r;

	/* What getopt_long() begins its complaints with. */
	(void)snprintf(title, sizeof(title), "fmhactl %s", command->name);
	argv[0] = title;
	r = command->run(argc, argv);
	if (r == CTL_USAGE)
		(void)fprintf(stderr, "`%s --help` says more\n", title);
	/* A full disk or a closed pipe must not look like success. */
	if (fflush(stdout) != 0 && r == CTL_OK) {
		(void)fputs("fmhactl: cannot write to stdout\n", stderr);
		return CTL_IO;
	}
	return r;
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";

	if (!strcmp(name, "--version")) {
		(void)printf("fmhactl %s\n", fmha_version());
		return CTL_OK;
	}
	if (!strcmp(name, "help") || !strcmp(name, "--help") || !strcmp(name, "-h")) {
		print_help(stdout);
		return CTL_OK;
	}
	for (size_t i = 0; i < N_COMMANDS; i++) {
		if (!strcmp(name, commands[i].name))
			return run_command(&commands[i], argc - 1, argv + 1);
	}
	if (name[0])
		(void)ctl_usage_error("no command '%s'", name);
	print_help(stderr);
	return CTL_USAGE;
}
