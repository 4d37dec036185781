/* A stand-in for libnvidia-ml.so.1: the functions that gpuwatch and nvitop call.
 *
 * NVMLSTUB_STATE names a text file, looked at again when it changes (replace it by rename).
 * NVMLSTUB_COUNTS names a file that is mapped and holds, exactly at every moment, the calls of
 * each function: records of `struct count`. One line of the state is one fact; GPU is a number
 * or `*`, FUNCTION a name or `*`:
 *
 *   count N                              devices listed
 *   init CODE                            what nvmlInit returns
 *   gpu GPU KEY VALUE                    see set(): util, power (mW), name, uuid ...
 *   proc GPU compute|graphics PID BYTES  BYTES -1: NVML's word for not available
 *   gpm GPU ID VALUE                     a GPM metric; without any, GPM is not supported
 *   gpmfault GPU ID CODE                 that metric alone fails
 *   field GPU ID BASE RATE TYPE          BASE + RATE per second since the library's start
 *   mig GPU GI CI UUID TOTAL USED        one MIG device
 *   event SEQ GPU XID                    reported once, in the order of SEQ
 *   fault GPU FUNCTION CODE              that function returns CODE
 *   delay GPU FUNCTION MICROSECONDS      that function takes so long
 *   crash GPU FUNCTION                   that function ends the process by SIGSEGV
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 16, MIGS = 8, PROCS = 256, METRICS = 32, FIELDS = 32, RULES = 64, EVENTS = 32 };
enum { FUNCTIONS = 128 };
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    ARGUMENT_VERSION_MISMATCH = 25,
};
typedef unsigned long long u64;

struct process { int graphics; unsigned pid; u64 bytes; };
struct metric { unsigned id; double value; int code; };
struct field { unsigned id; double base, rate; int type; };
struct mig { unsigned gi, ci; char uuid[96]; u64 total, used; };
struct gpu {
    char name[96], uuid[96];
    int util, memory_util, fan, temperature, sm, sm_max, memory_clock, memory_clock_max;
    int gen, gen_max, width, width_max, persistence, mig_mode, pcie_rx_kib, pcie_tx_kib;
    int power, power_limit;
    u64 total, used, reserved, reasons, ecc_corrected, ecc_uncorrected;
    int gpm_query; /* what the support query says: -1 = as the metrics are there */
    struct process procs[PROCS];
    struct metric metrics[METRICS];
    struct field fields[FIELDS];
    struct mig migs[MIGS];
    int n_procs, n_metrics, n_fields, n_migs;
};
struct rule { char kind; int gpu; char function[64]; long value; };
struct event { u64 seq; int gpu; u64 xid; };
struct state {
    int count, init;
    char driver[64];
    struct gpu gpus[GPUS];
    struct rule rules[RULES];
    struct event events[EVENTS];
    int n_rules, n_events;
};
struct count { char function[56]; uint64_t total; uint64_t gpus[GPUS]; };
typedef struct { char mark; } *Device;

static char handles[GPUS], mig_handles[GPUS][MIGS];
static struct state *state; /* replaced, never changed: readers need no lock */
static struct stat seen;
static struct count *counts;
static int initialized;
static double started_s, looked_s;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void set(struct gpu *g, const char *key, const char *text) {
    struct { const char *key; int *to; } ints[] = {
        {"util", &g->util}, {"memory_util", &g->memory_util}, {"fan", &g->fan},
        {"temperature", &g->temperature}, {"sm", &g->sm}, {"sm_max", &g->sm_max},
        {"memory_clock", &g->memory_clock}, {"memory_clock_max", &g->memory_clock_max},
        {"gen", &g->gen}, {"gen_max", &g->gen_max}, {"width", &g->width},
        {"width_max", &g->width_max}, {"persistence", &g->persistence},
        {"mig_mode", &g->mig_mode}, {"power", &g->power}, {"power_limit", &g->power_limit},
        {"pcie_rx_kib", &g->pcie_rx_kib}, {"pcie_tx_kib", &g->pcie_tx_kib},
        {"gpm_query", &g->gpm_query},
    };
    struct { const char *key; u64 *to; } longs[] = {
        {"total", &g->total}, {"used", &g->used}, {"reserved", &g->reserved},
        {"reasons", &g->reasons}, {"ecc_corrected", &g->ecc_corrected},
        {"ecc_uncorrected", &g->ecc_uncorrected},
    };
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++)
        if (!strcmp(key, ints[i].key)) { *ints[i].to = atoi(text); return; }
    for (size_t i = 0; i < sizeof longs / sizeof *longs; i++)
        if (!strcmp(key, longs[i].key)) { *longs[i].to = strtoull(text, 0, 0); return; }
    if (!strcmp(key, "name")) snprintf(g->name, sizeof g->name, "%.95s", text);
    else if (!strcmp(key, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%.95s", text);
    else { fprintf(stderr, "nvmlstub: unknown key %s\n", key); abort(); }
}

static void fact_of_gpu(struct state *s, int i, const char *line) {
    struct gpu *g = &s->gpus[i];
    char key[64], text[160], uuid[96];
    unsigned a, b, type;
    long long big;
    double x, y;
    u64 total, used;
    if (sscanf(line, "gpu %*s %63s %159[^\n]", key, text) == 2) set(g, key, text);
    else if (sscanf(line, "proc %*s %63s %u %lld", key, &a, &big) == 3 && g->n_procs < PROCS)
        g->procs[g->n_procs++] = (struct process){!strcmp(key, "graphics"), a, (u64)big};
    else if (sscanf(line, "gpmfault %*s %u %u", &a, &b) == 2 && g->n_metrics < METRICS)
        g->metrics[g->n_metrics++] = (struct metric){a, 0, (int)b};
    else if (sscanf(line, "gpm %*s %u %lf", &a, &x) == 2 && g->n_metrics < METRICS)
        g->metrics[g->n_metrics++] = (struct metric){a, x, OK};
    else if (sscanf(line, "field %*s %u %lf %lf %u", &a, &x, &y, &type) == 4 && g->n_fields < FIELDS)
        g->fields[g->n_fields++] = (struct field){a, x, y, (int)type};
    else if (sscanf(line, "mig %*s %u %u %95s %llu %llu", &a, &b, uuid, &total, &used) == 5 &&
             g->n_migs < MIGS) {
        struct mig *m = &g->migs[g->n_migs++];
        *m = (struct mig){.gi = a, .ci = b, .total = total, .used = used};
        memcpy(m->uuid, uuid, sizeof uuid);
    } else { fprintf(stderr, "nvmlstub: cannot read: %s", line); abort(); }
}

static void fact(struct state *s, const char *line) {
    char kind[16], who[16], function[64];
    long value = 0;
    u64 seq, xid;
    int gpu;
    if (sscanf(line, "%15s", kind) != 1 || *kind == '#') return;
    if (sscanf(line, "count %d", &s->count) == 1 || sscanf(line, "init %d", &s->init) == 1) return;
    if (sscanf(line, "event %llu %d %llu", &seq, &gpu, &xid) == 3) {
        if (s->n_events < EVENTS) s->events[s->n_events++] = (struct event){seq, gpu, xid};
        return;
    }
    if (!strcmp(kind, "fault") || !strcmp(kind, "delay") || !strcmp(kind, "crash")) {
        if (sscanf(line, "%*s %15s %63s %ld", who, function, &value) < 2 || s->n_rules >= RULES) abort();
        struct rule *r = &s->rules[s->n_rules++];
        *r = (struct rule){.kind = *kind, .gpu = *who == '*' ? -1 : atoi(who), .value = value};
        memcpy(r->function, function, sizeof function);
        return;
    }
    if (sscanf(line, "%*s %15s", who) != 1) abort();
    for (int i = 0; i < GPUS; i++)
        if (*who == '*' || atoi(who) == i) fact_of_gpu(s, i, line);
}

static void look(void) {
    const char *path = getenv("NVMLSTUB_STATE");
    struct stat found;
    double t = now_s();
    if (state && t - looked_s < 0.01) return;
    looked_s = t;
    if (!path || stat(path, &found)) return;
    if (state && found.st_ino == seen.st_ino && found.st_size == seen.st_size &&
        found.st_mtim.tv_sec == seen.st_mtim.tv_sec && found.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    seen = found;
    struct state *s = calloc(1, sizeof *s);
    for (int i = 0; i < GPUS; i++) {
        snprintf(s->gpus[i].name, 96, "NVIDIA Stand-in");
        snprintf(s->gpus[i].uuid, 96, "GPU-00000000-0000-0000-0000-%012d", i);
        s->gpus[i].gpm_query = -1;
    }
    char line[512];
    while (fgets(line, sizeof line, file)) fact(s, line);
    fclose(file);
    state = s; /* the former stays: another thread may be reading it */
}

static void count(const char *function, int gpu) {
    if (!counts) {
        const char *path = getenv("NVMLSTUB_COUNTS");
        size_t size = FUNCTIONS * sizeof *counts;
        int fd = path ? open(path, O_RDWR | O_CREAT, 0644) : -1;
        if (fd >= 0 && !ftruncate(fd, (off_t)size))
            counts = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (!counts || counts == MAP_FAILED) counts = calloc(FUNCTIONS, sizeof *counts);
    }
    for (int i = 0; i < FUNCTIONS; i++) {
        if (!*counts[i].function) snprintf(counts[i].function, sizeof counts[i].function, "%s", function);
        if (strcmp(counts[i].function, function)) continue;
        counts[i].total++;
        if (gpu >= 0) counts[i].gpus[gpu]++;
        return;
    }
}

/* Count the call, wait, crash or fail as the state says; the code to return. */
static int enter(const char *function, int gpu) {
    long wait_us = 0, code = OK;
    int crash = 0;
    pthread_mutex_lock(&lock);
    if (!started_s) started_s = now_s();
    look();
    count(function, gpu);
    if (!state) { pthread_mutex_unlock(&lock); return UNINITIALIZED; }
    for (int i = 0; i < state->n_rules; i++) {
        struct rule *r = &state->rules[i];
        if (strcmp(r->function, "*") && strcmp(r->function, function)) continue;
        /* `*` is every device; a rule that names its function also meets calls without one */
        if (gpu < 0 ? (r->gpu >= 0 || !strcmp(r->function, "*")) : (r->gpu >= 0 && r->gpu != gpu)) continue;
        if (r->kind == 'f') code = r->value;
        else if (r->kind == 'd') wait_us = r->value;
        else crash = 1;
    }
    pthread_mutex_unlock(&lock);
    if (wait_us) {
        struct timespec t = {wait_us / 1000000, wait_us % 1000000 * 1000};
        while (nanosleep(&t, &t)) { }
    }
    if (crash) { signal(SIGSEGV, SIG_DFL); raise(SIGSEGV); }
    if (code == OK && !initialized && strncmp(function, "nvmlInit", 8)) return UNINITIALIZED;
    return (int)code;
}

static int gpu_of(Device d) {
    char *p = (char *)d;
    if (p >= handles && p < handles + GPUS) return (int)(p - handles);
    if (p >= &mig_handles[0][0] && p < &mig_handles[0][0] + GPUS * MIGS)
        return (int)(p - &mig_handles[0][0]) / MIGS;
    return -1;
}

static struct mig *mig_of(Device d) {
    char *p = (char *)d;
    if (p < &mig_handles[0][0] || p >= &mig_handles[0][0] + GPUS * MIGS) return 0;
    int at = (int)(p - &mig_handles[0][0]);
    return &state->gpus[at / MIGS].migs[at % MIGS];
}

#define ENTER(device)                                  \
    int at = gpu_of(device);                           \
    int code = enter(__func__, at);                    \
    if (code != OK) return code;                       \
    if (at < 0) return INVALID_ARGUMENT;               \
    struct gpu *g = &state->gpus[at];                  \
    struct mig *m = mig_of(device);                    \
    (void)g; (void)m
#define PHYSICAL if (m) return NOT_SUPPORTED

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = enter(__func__, -1);
    if (code == OK) code = state->init;
    if (code == OK) initialized++;
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    int code = enter(__func__, -1);
    if (code == OK) initialized--;
    return code;
}
const char *nvmlErrorString(int code) { (void)code; return "error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    int code = enter(__func__, -1);
    if (code == OK) snprintf(text, size, "570.00.00");
    return code;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    int code = enter(__func__, -1);
    *version = 12080;
    return code;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
int nvmlDeviceGetCount_v2(unsigned *number) {
    int code = enter(__func__, -1);
    if (code == OK) *number = (unsigned)state->count;
    return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    int code = enter(__func__, index < GPUS ? (int)index : -1);
    if (code != OK) return code;
    if ((int)index >= state->count) return INVALID_ARGUMENT;
    *device = (Device)&handles[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    for (int i = 0; i < state->count; i++)
        if (!strcmp(uuid, state->gpus[i].uuid)) {
            *device = (Device)&handles[i];
            return enter("(handle)", i);
        }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Device device, unsigned *index) { ENTER(device); *index = (unsigned)at; return OK; }
int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    ENTER(device);
    snprintf(text, size, m ? "%s MIG" : "%s", g->name);
    return OK;
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    ENTER(device);
    snprintf(text, size, "%s", m ? m->uuid : g->uuid);
    return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(Device device, struct pci *pci) {
    ENTER(device);
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)at + 1;
    snprintf(pci->bus_id, 32, "00000000:%02X:00.0", (at + 1) & 0xff);
    snprintf(pci->legacy, 16, "0000:%02X:00.0", (at + 1) & 0xff);
    return OK;
}
struct memory { u64 total, free, used; };
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(Device device, struct memory *memory) {
    ENTER(device);
    u64 total = m ? m->total : g->total, used = m ? m->used : g->used + g->reserved;
    if (!total) return NOT_SUPPORTED;
    *memory = (struct memory){total, total - used, used};
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *memory) {
    ENTER(device);
    if (memory->version != 0x02000028) return ARGUMENT_VERSION_MISMATCH;
    u64 total = m ? m->total : g->total, used = m ? m->used : g->used, reserved = m ? 0 : g->reserved;
    if (!total) return NOT_SUPPORTED;
    *memory = (struct memory_v2){memory->version, total, reserved, total - used - reserved, used};
    return OK;
}
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(Device device, struct utilization *u) {
    ENTER(device);
    PHYSICAL;
    if (g->mig_mode > 0) return NOT_SUPPORTED;
    *u = (struct utilization){(unsigned)g->util, (unsigned)g->memory_util};
    return OK;
}
#define VALUE(function, kind, expression, present)      \
    int function(Device device, kind *value) {          \
        ENTER(device);                                  \
        PHYSICAL;                                       \
        if (!(present)) return NOT_SUPPORTED;           \
        *value = (kind)(expression);                    \
        return OK;                                      \
    }
VALUE(nvmlDeviceGetPowerUsage, unsigned, g->power, 1)
VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned, g->power_limit, g->power_limit)
VALUE(nvmlDeviceGetPowerManagementLimit, unsigned, g->power_limit, g->power_limit)
VALUE(nvmlDeviceGetFanSpeed, unsigned, g->fan, g->fan >= 0)
VALUE(nvmlDeviceGetPerformanceState, unsigned, 0, 1)
VALUE(nvmlDeviceGetPersistenceMode, unsigned, g->persistence, 1)
VALUE(nvmlDeviceGetComputeMode, unsigned, 0, 1)
VALUE(nvmlDeviceGetDisplayActive, unsigned, 0, 1)
VALUE(nvmlDeviceGetDisplayMode, unsigned, 0, 1)
VALUE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, g->gen, g->gen)
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, g->gen_max, g->gen_max)
VALUE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, g->width, g->width)
VALUE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, g->width_max, g->width_max)
VALUE(nvmlDeviceGetCurrentClocksEventReasons, u64, g->reasons, 1)
VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, u64, g->reasons, 1)
VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned, MIGS - 1, 1)
static int clock_of(struct gpu *g, unsigned type, int max, unsigned *value) {
    if (type > 3) return INVALID_ARGUMENT;
    int memory = max ? g->memory_clock_max : g->memory_clock, sm = max ? g->sm_max : g->sm;
    *value = (unsigned)(type == 2 ? memory : sm);
    return OK;
}
int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *value) {
    ENTER(device);
    PHYSICAL;
    return clock_of(g, type, 0, value);
}
int nvmlDeviceGetMaxClockInfo(Device device, unsigned type, unsigned *value) {
    ENTER(device);
    PHYSICAL;
    return clock_of(g, type, 1, value);
}
struct temperature { unsigned version, sensor; int value; };
int nvmlDeviceGetTemperatureV(Device device, struct temperature *t) {
    ENTER(device);
    PHYSICAL;
    if (t->version != 0x100000C) return ARGUMENT_VERSION_MISMATCH;
    t->value = g->temperature;
    return OK;
}
int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *value) {
    ENTER(device);
    PHYSICAL;
    (void)sensor;
    *value = (unsigned)g->temperature;
    return OK;
}
int nvmlDeviceGetPcieThroughput(Device device, unsigned counter, unsigned *value) {
    ENTER(device);
    PHYSICAL;
    struct timespec t = {0, 20000000}; /* as the real one: it counts for 20 ms */
    nanosleep(&t, 0);
    int kib = counter ? g->pcie_rx_kib : g->pcie_tx_kib;
    if (kib <= 0) return NOT_SUPPORTED;
    *value = (unsigned)kib;
    return OK;
}
int nvmlDeviceGetEncoderUtilization(Device device, unsigned *value, unsigned *period_us) {
    ENTER(device);
    *value = 0;
    *period_us = 166666;
    return OK;
}
int nvmlDeviceGetDecoderUtilization(Device device, unsigned *value, unsigned *period_us) {
    ENTER(device);
    *value = 0;
    *period_us = 166666;
    return OK;
}
int nvmlDeviceGetDriverModel_v2(Device device, unsigned *a, unsigned *b) {
    ENTER(device);
    (void)a; (void)b;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, u64 *value) {
    ENTER(device);
    (void)counter;
    *value = type ? g->ecc_uncorrected : g->ecc_corrected;
    return OK;
}
int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    ENTER(device);
    PHYSICAL;
    if (g->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)g->mig_mode;
    return OK;
}
int nvmlDeviceIsMigDeviceHandle(Device device, unsigned *is) { ENTER(device); *is = m != 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *found) {
    ENTER(device);
    if (g->mig_mode <= 0 || (int)index >= g->n_migs) return NOT_FOUND;
    *found = (Device)&mig_handles[at][index];
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device device, Device *parent) {
    ENTER(device);
    *parent = (Device)&handles[at];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(Device device, unsigned *id) {
    ENTER(device);
    if (!m) return NOT_SUPPORTED;
    *id = m->gi;
    return OK;
}
int nvmlDeviceGetComputeInstanceId(Device device, unsigned *id) {
    ENTER(device);
    if (!m) return NOT_SUPPORTED;
    *id = m->ci;
    return OK;
}
struct info { unsigned pid; u64 bytes; unsigned gi, ci; };
static int list(struct gpu *g, int graphics, unsigned *number, struct info *infos) {
    unsigned found = 0, room = *number;
    for (int i = 0; i < g->n_procs; i++) {
        if (g->procs[i].graphics != graphics) continue;
        if (infos && found < room)
            infos[found] = (struct info){g->procs[i].pid, g->procs[i].bytes, ~0u, ~0u};
        found++;
    }
    *number = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *number, struct info *infos) {
    ENTER(device);
    return list(g, 0, number, infos);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *number, struct info *infos) {
    ENTER(device);
    return list(g, 1, number, infos);
}
int nvmlDeviceGetProcessUtilization(Device device, void *samples, unsigned *number, u64 since) {
    ENTER(device);
    (void)samples; (void)since;
    *number = 0;
    return NOT_FOUND;
}

struct value {
    unsigned id, scope;
    long long at_us, latency_us;
    int type, code;
    union { double d; unsigned u; u64 ull; int i; } value;
};
int nvmlDeviceGetFieldValues(Device device, int number, struct value *values) {
    ENTER(device);
    PHYSICAL;
    for (int i = 0; i < number; i++) {
        struct value *v = &values[i];
        v->code = NOT_SUPPORTED;
        v->value.ull = 0;
        v->at_us = (long long)(now_s() * 1e6);
        /* The real library has written one entry past the last for NVLink fields. */
        if (v->id >= 138 && v->id <= 141) memset(&values[number], 0x5a, sizeof *values);
        for (int j = 0; j < g->n_fields; j++) {
            struct field *f = &g->fields[j];
            if (f->id != v->id) continue;
            double x = f->base + f->rate * (now_s() - started_s);
            v->code = OK;
            v->type = f->type;
            if (f->type == 0) v->value.d = x;
            else if (f->type == 1) v->value.u = (unsigned)(u64)x;
            else if (f->type == 5) v->value.i = (int)x;
            else v->value.ull = (u64)x;
        }
    }
    return OK;
}

struct sample { double at_s; int gpu, gi; };
struct support { unsigned version, supported; };
struct metric_get { unsigned id; int code; double value; const char *names[3]; };
struct metrics_get { unsigned version, number; struct sample *before, *after; struct metric_get metrics[]; };
int nvmlGpmQueryDeviceSupport(Device device, struct support *s) {
    ENTER(device);
    s->supported = g->gpm_query >= 0 ? (unsigned)g->gpm_query : g->n_metrics > 0;
    return OK;
}
int nvmlGpmSampleAlloc(struct sample **s) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    *s = calloc(1, sizeof **s);
    (*s)->gpu = -1;
    return OK;
}
int nvmlGpmSampleFree(struct sample *s) {
    int code = enter(__func__, -1);
    free(s);
    return code;
}
int nvmlGpmSampleGet(Device device, struct sample *s) {
    ENTER(device);
    if (!g->n_metrics) return NOT_SUPPORTED;
    *s = (struct sample){now_s(), at, -1};
    return OK;
}
int nvmlGpmMigSampleGet(Device device, unsigned gi, struct sample *s) {
    ENTER(device);
    if (!g->n_metrics) return NOT_SUPPORTED;
    for (int i = 0; i < g->n_migs; i++)
        if (g->migs[i].gi == gi) { *s = (struct sample){now_s(), at, (int)gi}; return OK; }
    return NOT_FOUND;
}
int nvmlGpmMetricsGet(struct metrics_get *get) {
    int at = get->after ? get->after->gpu : -1;
    int code = enter(__func__, at);
    if (code != OK) return code;
    if (get->version != 1 || !get->before || at < 0 || get->before->gpu != at ||
        get->before->gi != get->after->gi || get->after->at_s - get->before->at_s < 0.1)
        return INVALID_ARGUMENT;
    struct gpu *g = &state->gpus[at];
    for (unsigned i = 0; i < get->number; i++) {
        struct metric_get *v = &get->metrics[i];
        v->code = NOT_SUPPORTED;
        v->value = 0;
        for (int j = 0; j < g->n_metrics; j++)
            if (g->metrics[j].id == v->id) { v->code = g->metrics[j].code; v->value = g->metrics[j].value; }
    }
    return OK;
}

struct event_data { Device device; u64 type, data; unsigned gi, ci; };
struct set { u64 last; };
int nvmlEventSetCreate(struct set **s) {
    int code = enter(__func__, -1);
    if (code == OK) *s = calloc(1, sizeof **s);
    return code;
}
int nvmlEventSetFree(struct set *s) { (void)s; return enter(__func__, -1); }
int nvmlDeviceGetSupportedEventTypes(Device device, u64 *types) { ENTER(device); *types = 0x1f; return OK; }
int nvmlDeviceRegisterEvents(Device device, u64 types, struct set *s) {
    ENTER(device);
    (void)types; (void)s;
    return OK;
}
int nvmlEventSetWait_v2(struct set *s, struct event_data *data, unsigned timeout_ms) {
    int code = enter(__func__, -1);
    if (code != OK) return code;
    for (double end_s = now_s() + timeout_ms / 1e3;;) {
        pthread_mutex_lock(&lock);
        look();
        struct state *now = state;
        pthread_mutex_unlock(&lock);
        for (int i = 0; i < now->n_events; i++) {
            struct event *e = &now->events[i];
            if (e->seq <= s->last) continue;
            s->last = e->seq;
            *data = (struct event_data){(Device)&handles[e->gpu], 8, e->xid, ~0u, ~0u};
            return OK;
        }
        if (now_s() >= end_s) return TIMEOUT;
        struct timespec t = {0, 20000000};
        nanosleep(&t, 0);
    }
}
