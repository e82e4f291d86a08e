/* SPDX-License-Identifier: MIT */
/*
 * fmhactl: fmhad's command line. One table of commands; each is a file of its own. `--document
 * FORMAT` writes what completion and manual pages are made of when fmhad is built.
 */
#include "ctl.h"

#include <stdio.h>
#include <string.h>

static const struct ctl_command *const commands[] = {
	&ctl_ping,      &ctl_status,  &ctl_top,      &ctl_metrics, &ctl_trace, &ctl_census,
	&ctl_doctor,    &ctl_devices, &ctl_run,      &ctl_verify,  &ctl_plan,  &ctl_bench,
	&ctl_tune,      &ctl_warm,    &ctl_registry, &ctl_pool,    &ctl_archs, &ctl_profiles,
	&ctl_enumerate, &ctl_build,   &ctl_validate, &ctl_mask,
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static const struct cli_usage usage = {
	.name = "fmhactl",
	.brief = "talks to fmhad, the fused multi-head attention service",
	.synopsis = "COMMAND [OPTION...]",
	.text = "Options may stand before or after the command. The daemon is looked for at "
		"--socket "
		"PATH, $FMHAD_SOCKET, $XDG_RUNTIME_DIR/fmhad.sock, /run/fmhad/fmhad.sock.\n"
		"\n"
		"exit codes: 0 success, 1 a check failed, 2 usage, 3 daemon unreachable, 4 the "
		"daemon "
		"refused, 5 a file cannot be read, written or understood, 6 no answer within "
		"--timeout",
	.tables = {ctl_json_option, ctl_target_options},
	.in_order = true,
};

/* "ping" of "fmhactl ping". */
static const char *command_name(const struct ctl_command *command)
{
	return strrchr(command->usage.name, ' ') + 1;
}

static void print_help(FILE *out)
{
	cli_print_help(&usage, out);
	(void)fputs("\ncommands; `fmhactl COMMAND --help` says more:\n\n", out);
	for (size_t i = 0; i < N_COMMANDS; i++)
		(void)fprintf(out, "  %-10s %s\n", command_name(commands[i]),
			      commands[i]->usage.brief);
}

/* NULL: there is none. */
static const struct ctl_command *find_command(const char *name)
{
	for (size_t i = 0; i < N_COMMANDS; i++)
		if (strcmp(name, command_name(commands[i])) == 0)
			return commands[i];
	return NULL;
}

static int no_command(const char *name)
{
	return ctl_usage_error("no command '%s'\n`fmhactl --help` says more", name);
}

/* @name: of a command, or NULL. */
static int help(const char *name)
{
	const struct ctl_command *command = name ? find_command(name) : NULL;

	if (name && !command)
		return no_command(name);
	if (command)
		cli_print_help(&command->usage, stdout);
	else
		print_help(stdout);
	return fflush(stdout) == 0 ? CTL_OK : CTL_IO;
}

static int document(const char *format)
{
	const struct cli_usage *usages[N_COMMANDS + 1] = {NULL};
	const struct cli_program program = {
		.usage = &usage, .commands = usages, .listed = "ARCH", .lister = "fmhactl archs"};

	for (size_t i = 0; i < N_COMMANDS; i++)
		usages[i] = &commands[i]->usage;
	if (!cli_document(&program, format, stdout))
		return ctl_usage_error("--document %s: man, bash, zsh or fish", format);
	return fflush(stdout) == 0 ? CTL_OK : CTL_IO;
}

static int run_command(const struct ctl_command *command, int argc, char **argv)
{
	char title[64];
	int r;

	/* What cli_next() begins its complaints with. */
	(void)snprintf(title, sizeof(title), "%s", command->usage.name);
	argv[0] = title;
	optind = 0; /* begin anew */
	r = command->run(argc, argv);
	if (r == CTL_USAGE)
		(void)fprintf(stderr, "`%s --help` says more\n", title);
	/* A full disk or a closed pipe must not look like success. */
	if (fflush(stdout) != 0 || ferror(stdout)) {
		(void)fputs("fmhactl: cannot write to stdout\n", stderr);
		return r == CTL_OK ? CTL_IO : r;
	}
	return r;
}

/*
 * From "--json status --limits" to "status --json --limits": a command sees options that came before
 * its name behind its first operand, which may be a verb. @n: how many words came before.
 */
static void move_options(char **argv, int argc, int n)
{
	int n_words = n + 1 < argc && argv[n + 1][0] != '-' ? 2 : 1;

	for (int i = 0; i < n_words; i++) {
		char *word = argv[n + i];

		memmove(argv + i + 1, argv + i, (size_t)n * sizeof(*argv));
		argv[i] = word;
	}
}

int main(int argc, char **argv)
{
	static char program[] = "fmhactl";
	const struct ctl_command *command;
	const char *name;
	int option;

	if (argc == 3 && !strcmp(argv[1], "--document"))
		return document(argv[2]);
	if (argc == 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")))
		return help(NULL);
	if (argc >= 2 && argc <= 3 && !strcmp(argv[1], "help"))
		return help(argc == 3 ? argv[2] : NULL);
	argv[0] = program; /* what complaints begin with */
	while ((option = cli_next(&usage, argc, argv, NULL)) != -1) {
		if (option == '?') {
			(void)fputs("`fmhactl --help` says more\n", stderr);
			return CTL_USAGE;
		}
	}
	name = optind < argc ? argv[optind] : "";
	command = find_command(name);
	if (command) {
		move_options(argv + 1, argc - 1, optind - 1);
		return run_command(command, argc - 1, argv + 1);
	}
	if (name[0])
		return no_command(name);
	print_help(stderr);
	return CTL_USAGE;
}
