/* SPDX-License-Identifier: MIT */
/* doctor.c: is everything there that a working fmhad needs; and for what is not, what to do. */
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <catalogue/backends.h>
#include <specs/catalog.h>
#include <tree/tree.h>

#include "doctor.h"
#include "json.h"

#define DEFAULT_SECONDS 60

extern char **environ;

/* The first line that a program prints; its exit status, or -1 when it cannot be run. */
static int program_ask(char *const argv[], char *line, size_t n)
{
	posix_spawn_file_actions_t actions;
	int ends[2], status = -1;
	FILE *out;
	pid_t pid;

	line[0] = '\0';
	if (pipe(ends) < 0)
		return -1;
	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
	(void)posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
	(void)posix_spawn_file_actions_addclose(&actions, ends[0]);
	if (posix_spawn(&pid, argv[0], &actions, NULL, argv, environ) != 0)
		pid = -1;
	(void)posix_spawn_file_actions_destroy(&actions);
	(void)close(ends[1]);
	out = fdopen(ends[0], "re");
	if (out && pid > 0 && fgets(line, (int)n, out))
		line[strcspn(line, "\n")] = '\0';
	if (out)
		(void)fclose(out);
	if (pid > 0 && waitpid(pid, &status, 0) == pid)
		return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
	return -1;
}

/* ---- what is installed ---- */

/* What lacks files: a build tree, which has its build's list beside it, or what was installed. */
static const char *how_to_repair(void)
{
	char path[PATH_MAX];

	(void)tree_path(TREE_PROGRAMS, "../build.ninja", path, sizeof(path));
	return access(path, F_OK) == 0 ? "build it again: ./dev build"
				       : "install the package fmhad again, or set FMHA_SPECS_DIR";
}

static void check_files(struct doctor *doctor)
{
	struct spec_catalog *catalog = NULL;
	struct fmha_error err = {0};
	char path[PATH_MAX];

	if (spec_catalog_load(NULL, fmha_backends, &catalog, &err) < 0)
		doctor_report(doctor, DOCTOR_WRONG, "specs", how_to_repair(), "%s", err.msg);
	else
		doctor_report(doctor, DOCTOR_GOOD, "specs", NULL, "%s",
			      tree_path(TREE_DATA, "specs", path, sizeof(path)));
	(void)spec_catalog_free(catalog);
	(void)tree_path(TREE_DATA, "kernels/gpu/fmha.hip", path, sizeof(path));
	if (access(path, R_OK) != 0)
		doctor_report(doctor, DOCTOR_WRONG, "kernel sources", how_to_repair(), "%s: %s",
			      path, strerror(errno));
	(void)tree_path(TREE_HELPERS, "fmhad-compile", path, sizeof(path));
	if (access(path, X_OK) != 0)
		doctor_report(doctor, DOCTOR_WRONG, "helper", how_to_repair(), "%s: %s", path,
			      strerror(errno));
}

static void check_configuration(struct doctor *doctor)
{
	char path[PATH_MAX], line[512];
	char check[] = "--check", *argv[] = {path, check, NULL};
	int status;

	(void)tree_path(TREE_PROGRAMS, "fmhad", path, sizeof(path));
	status = program_ask(argv, line, sizeof(line));
	if (status == 0)
		doctor_report(doctor, DOCTOR_GOOD, "configuration", NULL,
			      "/etc/fmhad/fmhad.json, or none");
	else if (status == -1)
		doctor_report(doctor, DOCTOR_WRONG, "fmhad", "install the package fmhad",
			      "%s cannot be run", path);
	else
		doctor_report(doctor, DOCTOR_WRONG, "configuration",
			      "correct it: `man fmhad.json` has every key", "%s", line);
}

/* ---- GPUs ---- */

struct gpu_kind {
	const char *what, *node, *module;
	const char *drivers[4]; /* any of them */
	const char *no_driver;
	const char *compilers[3]; /* any of them */
	const char *no_compiler;
};

static const struct gpu_kind gpu_kinds[] = {
	{"NVIDIA GPU",
	 "/dev/nvidia0",
	 "fmhad-cuda.so",
	 {"libcuda.so.1", NULL},
	 "install NVIDIA's driver (Debian: libcuda1)",
	 {"nvrtc", NULL},
	 "install the CUDA toolkit's libnvrtc.so.12 or .13, or pip's nvidia-cuda-nvrtc, and tell "
	 "ldconfig its folder"},
	{"AMD GPU",
	 "/dev/kfd",
	 "fmhad-hip.so",
	 {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", NULL},
	 "install ROCm and tell ldconfig its folder, or for older GPUs Debian's libamdhip64-5",
	 {"clang", "hiprtc", NULL},
	 "install clang-19 and lld-19, or ROCm's hipRTC; gfx950 and gfx12 need ROCm's or a newer "
	 "clang (README)"},
};

static void check_compiler(struct doctor *doctor, const struct gpu_kind *kind)
{
	char helper[PATH_MAX], line[256] = "", version[] = "--version", none[] = "";

	(void)tree_path(TREE_HELPERS, "fmhad-compile", helper, sizeof(helper));
	for (int i = 0; kind->compilers[i]; i++) {
		char *argv[] = {helper, version, (char *)kind->compilers[i], none, NULL};

		if (program_ask(argv, line, sizeof(line)) == 0) {
			doctor_report(doctor, DOCTOR_GOOD, kind->compilers[i], NULL, "%s", line);
			return;
		}
	}
	doctor_report(doctor, DOCTOR_WRONG, kind->compilers[0], kind->no_compiler, "%s",
		      line[0] ? line : "it cannot be found");
}

/* The first that can be opened; NULL: dlerror() speaks of the last. */
static const char *find_driver(const struct gpu_kind *kind)
{
	for (int i = 0; kind->drivers[i]; i++)
		if (dlopen(kind->drivers[i], RTLD_LAZY | RTLD_LOCAL))
			return kind->drivers[i];
	return NULL;
}

static void check_gpus(struct doctor *doctor)
{
	for (size_t i = 0; i < sizeof(gpu_kinds) / sizeof(gpu_kinds[0]); i++) {
		const struct gpu_kind *kind = &gpu_kinds[i];
		char module[PATH_MAX];
		const char *driver;

		if (access(kind->node, F_OK) != 0) {
			doctor_report(doctor, DOCTOR_GOOD, kind->what, NULL, "none (%s)",
				      kind->node);
			continue;
		}
		if (access(kind->node, R_OK | W_OK) != 0)
			doctor_report(
				doctor, DOCTOR_NOTE, kind->what,
				"only fmhad's user needs to: its unit has groups render and video",
				"%s: this user may not open it", kind->node);
		if (access(tree_path(TREE_MODULES, kind->module, module, sizeof(module)), R_OK) !=
		    0)
			doctor_report(doctor, DOCTOR_WRONG, kind->what,
				      "install the package of this module", "%s: %s", module,
				      strerror(errno));
		driver = find_driver(kind);
		if (driver)
			doctor_report(doctor, DOCTOR_GOOD, kind->what, NULL, "%s, %s", kind->node,
				      driver);
		else
			doctor_report(doctor, DOCTOR_WRONG, kind->what, kind->no_driver, "%s",
				      dlerror());
		check_compiler(doctor, kind);
	}
}

/* ---- the machine ---- */

static bool read_word(const char *path, char *word, size_t n)
{
	FILE *file = fopen(path, "re");
	bool found = file && fgets(word, (int)n, file);

	if (file)
		(void)fclose(file);
	if (found)
		word[strcspn(word, "\n")] = '\0';
	return found;
}

static void check_clocks(struct doctor *doctor)
{
	char word[64];

	if (read_word("/sys/devices/system/clocksource/clocksource0/current_clocksource", word,
		      sizeof(word))) {
		bool fast = !strcmp(word, "tsc") || strstr(word, "kvm-clock") ||
			    strstr(word, "arch_sys_counter");

		doctor_report(
			doctor, fast ? DOCTOR_GOOD : DOCTOR_NOTE, "clock",
			fast ? NULL
			     : "each look at the clock is a system call, which requests pay for; "
			       "boot "
			       "with clocksource=tsc if the machine has a stable one",
			"%s", word);
	}
	if (read_word("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", word,
		      sizeof(word))) {
		bool slow = !strcmp(word, "powersave") || !strcmp(word, "conservative");

		doctor_report(doctor, slow ? DOCTOR_NOTE : DOCTOR_GOOD, "CPU clock",
			      slow ? "for steady latencies: cpupower frequency-set -g performance"
				   : NULL,
			      "governor %s", word);
	}
}

/* ---- the daemon ---- */

/* In the group's list, whether or not this login knows it already. */
static bool is_listed(const struct group *group)
{
	const struct passwd *self = getpwuid(getuid());

	for (char **member = group->gr_mem; self && *member; member++)
		if (!strcmp(*member, self->pw_name))
			return true;
	return false;
}

static void check_group(struct doctor *doctor)
{
	const struct group *group = getgrnam("fmha");
	gid_t groups[256];
	int n = getgroups(256, groups);

	if (!group || geteuid() == 0)
		return; /* no installed service, or nobody who needs a group */
	for (int i = 0; i < n; i++)
		if (groups[i] == group->gr_gid) {
			doctor_report(doctor, DOCTOR_GOOD, "group", NULL,
				      "this user is in group fmha");
			return;
		}
	if (is_listed(group))
		doctor_report(doctor, DOCTOR_WRONG, "group", "log in again, or `newgrp fmha`",
			      "this login is older than the user's membership of group fmha");
	else
		doctor_report(
			doctor, DOCTOR_NOTE, "group",
			"for the machine's fmhad: sudo usermod -aG fmha $USER, and log in again",
			"this user is not in group fmha");
}

static void check_version(struct doctor *doctor, const char *version)
{
	if (!strcmp(version, fmha_version()))
		doctor_report(doctor, DOCTOR_GOOD, "versions", NULL, "%s everywhere", version);
	else
		doctor_report(doctor, DOCTOR_NOTE, "versions",
			      "systemctl restart fmhad, if it was upgraded",
			      "the daemon is %s, this library %s", version, fmha_version());
}

/* @compile: what the daemon says of its compilers. */
static void check_fit(struct doctor *doctor, const char *what, const char *arch,
		      const cJSON *compile)
{
	char helper[PATH_MAX], line[512], version[] = "--version", clang[] = "clang";
	char *argv[] = {helper,       version, clang, (char *)ctl_text(compile, "clang"),
			(char *)arch, NULL};
	int status;

	if (strncmp(arch, "gfx", 3) != 0)
		return;
	(void)tree_path(TREE_HELPERS, "fmhad-compile", helper, sizeof(helper));
	status = program_ask(argv, line, sizeof(line));
	if (status == 0)
		doctor_report(doctor, DOCTOR_GOOD, what, NULL, "is compiled for by %s", line);
	else if (status > 0)
		doctor_report(doctor, DOCTOR_WRONG, what, "a clang that will do, and restart fmhad",
			      "%s", line);
}

/* @sharing: how a GPU's memory gets to other processes, the preferred way first; NULL: of no GPU. */
static void check_sharing(struct doctor *doctor, const char *what, const cJSON *sharing)
{
	const cJSON *by = ctl_member(sharing, "by"), *first;
	const char *why = ctl_text(sharing, "no_descriptors");
	char trouble[128] = "";

	if (!sharing)
		return;
	first = cJSON_GetArrayItem(by, 0);
	if (why[0])
		(void)snprintf(trouble, sizeof(trouble), "; not by descriptors: %s", why);
	if (cJSON_IsString(first))
		doctor_report(
			doctor, why[0] ? DOCTOR_NOTE : DOCTOR_GOOD, "memory",
			why[0] ? "another version of the driver or of ROCm may have them; "
				 "until then fmhad makes no memory for clients, which import theirs"
			       : NULL,
			"%s: shared by %s%s", what, first->valuestring, trouble);
	else
		doctor_report(doctor, DOCTOR_WRONG, "memory",
			      "take another version of ROCm; until then tensors are copied",
			      "%s: cannot be shared by IPC handles: %s%s", what,
			      ctl_text(sharing, "no_handles"), trouble);
}

static void check_device(struct doctor *doctor, const cJSON *device, const cJSON *compile)
{
	const cJSON *worker = ctl_member(device, "worker");
	const cJSON *index = ctl_member(device, "device");
	char what[32];

	(void)snprintf(what, sizeof(what), "device %d",
		       cJSON_IsNumber(index) ? index->valueint : -1);
	if (strcmp(ctl_text(device, "state"), "ready") == 0)
		doctor_report(doctor, DOCTOR_GOOD, what, NULL, "%s (%s)", ctl_text(device, "name"),
			      ctl_text(device, "arch"));
	else
		doctor_report(doctor, DOCTOR_WRONG, what, "the log has more: journalctl -u fmhad",
			      "%s: %s", ctl_text(device, "state"), ctl_text(device, "last_death"));
	check_fit(doctor, what, ctl_text(device, "arch"), compile);
	check_sharing(doctor, what, ctl_member(worker, "sharing"));
	if (ctl_text(worker, "no_fences")[0])
		doctor_report(doctor, DOCTOR_NOTE, "fences",
			      "leave GPU_STREAMOPS_CP_WAIT unset, or take another version of ROCm; "
			      "until then "
			      "runs that name counters are refused",
			      "%s: %s", what, ctl_text(worker, "no_fences"));
	if (strcmp(ctl_text(worker, "mps"), "absent") == 0)
		doctor_report(
			doctor, DOCTOR_NOTE, "MPS",
			"start nvidia-cuda-mps-control -d before fmhad and its clients, else they "
			"take "
			"turns on the GPU, about 150 us a switch",
			"no control daemon answers at %s", ctl_text(worker, "mps_directory"));
	if (cJSON_GetArraySize(ctl_member(device, "quarantined")) > 0)
		doctor_report(doctor, DOCTOR_NOTE, "quarantine",
			      "`fmhactl status` names them, with the time left",
			      "%s has kernels that have ended workers and are not used", what);
}

static void check_cache(struct doctor *doctor, const cJSON *compile)
{
	const cJSON *cache = ctl_member(compile, "cache");
	const char *state = ctl_text(cache, "state");

	if (!strcmp(state, "unusable"))
		doctor_report(
			doctor, DOCTOR_WRONG, "cache",
			"every kernel is compiled anew after a restart: give fmhad's user a folder "
			"that it may write, or compile.cache another one",
			"%s", ctl_text(cache, "reason"));
	else
		doctor_report(doctor, DOCTOR_GOOD, "cache", NULL, "%s",
			      !strcmp(state, "ok") ? "in use" : "not used yet");
}

/* What is measured, and what administrators change: @device's model's. */
static void check_tuned(struct doctor *doctor, const cJSON *device)
{
	const cJSON *tuned = ctl_member(device, "tuned");
	const char *state = ctl_text(tuned, "state");
	const cJSON *index = ctl_member(device, "device");
	char what[32];

	(void)snprintf(what, sizeof(what), "times %d",
		       cJSON_IsNumber(index) ? index->valueint : -1);
	if (!strcmp(state, "unwritable"))
		doctor_report(
			doctor, DOCTOR_WRONG, what,
			"what is measured is lost at a restart: give fmhad's user a folder that it "
			"may write, or tuning.state another one",
			"%s", ctl_text(tuned, "reason"));
	else if (!strcmp(state, "unreadable"))
		doctor_report(
			doctor, DOCTOR_WRONG, what,
			"what was measured is not used, and nothing is written over it: mend the "
			"file, or move it away, and restart fmhad",
			"%s", ctl_text(tuned, "reason"));
	else if (!strcmp(state, "ok"))
		doctor_report(doctor, DOCTOR_GOOD, what, NULL, "kept in %s",
			      ctl_text(tuned, "directory"));
}

static void check_status(struct doctor *doctor, const char *json)
{
	cJSON *status = cJSON_Parse(json);
	const cJSON *front = ctl_member(status, "front");
	const cJSON *compile = ctl_member(front, "compile");
	const cJSON *device;

	check_version(doctor, ctl_text(status, "version"));
	cJSON_ArrayForEach(device, ctl_member(status, "devices"))
		check_device(doctor, device, compile),
		check_tuned(doctor, device);
	check_cache(doctor, compile);
	cJSON_Delete(status);
}

static void check_daemon(struct doctor *doctor)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .timeout_ms = doctor->target.timeout_ms,
						    .path = doctor->target.socket,
						    .name = "fmhactl doctor"};
	struct fmha_client_info info;
	struct fmha_client *client;
	struct fmha_error err = {0};
	char *json;

	if (fmha_connect(&options, &client, &err) < 0) {
		doctor_report(doctor, DOCTOR_WRONG, "daemon",
			      err.code == FMHA_EPERM
				      ? "sudo usermod -aG fmha $USER, and log in again"
				      : "sudo systemctl start fmhad.socket, or run fmhad by hand",
			      "%s", err.msg);
		return;
	}
	if (fmha_client_info(client, &info, &err) == 0)
		doctor_report(doctor, DOCTOR_GOOD, "daemon", NULL, "%s at %s", info.server,
			      info.path);
	if (fmha_client_status(client, &json, &err) == 0) {
		check_status(doctor, json);
		free(json);
	} else {
		doctor_report(doctor, DOCTOR_WRONG, "daemon",
			      "the log has more: journalctl -u fmhad", "%s", err.msg);
	}
	client = fmha_client_free(client);
}

static const struct cli_option own_options[] = {{"seconds", 's', "S",
						 "with --device: how long runs race (default 60)",
						 CLI_RANGE(REAL, struct doctor, seconds, 0, 86400)},
						CLI_END};

static int run_doctor(int argc, char **argv)
{
	struct doctor doctor = {.target = CTL_TARGET_INIT, .seconds = DEFAULT_SECONDS};
	int r = ctl_options(&ctl_doctor, argc, argv, &doctor.target, NULL, &doctor);

	if (r != 0)
		return r;
	if (doctor.target.json)
		doctor.findings = cJSON_CreateArray();
	check_files(&doctor);
	check_configuration(&doctor);
	check_gpus(&doctor);
	check_clocks(&doctor);
	check_group(&doctor);
	check_daemon(&doctor);
	if (doctor.target.device != FMHA_ANY_DEVICE)
		doctor_try_device(&doctor);
	if (doctor.target.json && (r = ctl_print_json(doctor.findings)) != CTL_OK)
		return r;
	return doctor.n_wrong > 0 ? CTL_FAILED : CTL_OK;
}

const struct ctl_command ctl_doctor = {
	.usage = {.name = "fmhactl doctor",
		  .brief = "is all there that fmhad needs, and what to do if not",
		  .synopsis = "[--json] [--device N [--seconds S]] [OPTION...]",
		  .text = "Looks at the installed files, the configuration, GPUs with their "
			  "drivers and "
			  "compilers, clocks, group membership, the daemon, its devices, MPS and "
			  "its "
			  "cache, and says for each thing that is wrong what to do. Exit code 1 "
			  "when "
			  "something is.\n\n"
			  "With --device N it also tries that device, in its worker: every family "
			  "of kernels in every type against the reference in double precision, odd "
			  "sizes, e4m3 of one sign, memory that this process shares with the "
			  "worker, "
			  "fences between two connections, and for a minute four connections whose "
			  "runs are to give the same bits. The lines are a table to send in when a "
			  "card is new: each has the kernel, its time and the worst error as a "
			  "share "
			  "of what is allowed.",
		  .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = run_doctor,
};
