// A libnvidia-ml.so.1 with two GPUs and a MIG device, for the real pynvml. FAKE_NVML_FAIL=NAME:CODE makes a function
// fail with an NVML error code (ALL for every reading). With -DOLD it is a driver without the newer functions.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *uuid; int number; int mig; } gpu_t;
typedef gpu_t *device_t;
static gpu_t gpus[] = {{"GPU-0a0a0a0a-1111-2222-3333-444444444444", 0, 0},
                       {"GPU-0b0b0b0b-1111-2222-3333-444444444444", 1, 0},
                       {"MIG-0c0c0c0c-1111-2222-3333-444444444444", 1, 1}};

static int fails(const char *name) {
  const char *set = getenv("FAKE_NVML_FAIL");
  if (!set) return 0;
  const char *colon = strchr(set, ':');
  size_t length = colon ? (size_t)(colon - set) : strlen(set);
  int hit = (strlen(name) == length && !strncmp(set, name, length)) ||
            (!strncmp(set, "ALL", length) && !strncmp(name, "nvmlDeviceGet", 13) && !strstr(name, "Handle"));
  return hit ? (colon ? atoi(colon + 1) : 999) : 0;
}
#define CHECK do { int code = fails(__func__); if (code) return code; } while (0)
static int get(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

int nvmlInitWithFlags(unsigned flags) { CHECK; return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "an error of the fake"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *out) {
  if (index > 1) return 2;
  *out = &gpus[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *out) {
  for (int i = 0; i < 3; i++)
    if (!strcmp(uuid, gpus[i].uuid)) { *out = &gpus[i]; return 0; }
  return 6;
}
int nvmlDeviceGetUUID(device_t gpu, char *out, unsigned length) { snprintf(out, length, "%s", gpu->uuid); return 0; }
int nvmlDeviceIsMigDeviceHandle(device_t gpu, unsigned *out) { *out = gpu->mig; return 0; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t gpu, device_t *out) { *out = &gpus[1]; return 0; }
int nvmlDeviceGetUtilizationRates(device_t gpu, struct { unsigned gpu, memory; } *out) {
  CHECK;
  if (gpu->mig) return 3;
  out->gpu = get("FAKE_NVML_UTILIZATION", 70 + gpu->number);
  return 0;
}
int nvmlDeviceGetMemoryInfo(device_t gpu, struct { uint64_t total, free, used; } *out) {
  CHECK;
  out->used = gpu->mig ? 1ull << 30 : (uint64_t)(40 + gpu->number) << 30;
  return 0;
}
int nvmlDeviceGetPowerUsage(device_t gpu, unsigned *out) {
  CHECK;
  if (gpu->mig) return 3;
  *out = get("FAKE_NVML_WATTS", 600 + gpu->number) * 1000;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(device_t gpu, unsigned *out) { CHECK; *out = 700000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(device_t gpu, uint64_t *out) {
  CHECK;
  static uint64_t joules = 5000000;
  joules += 10;
  *out = joules * 1000;
  return 0;
}
int nvmlDeviceGetTemperature(device_t gpu, int sensor, unsigned *out) { CHECK; *out = 60 + gpu->number; return 0; }
int nvmlDeviceGetClockInfo(device_t gpu, int clock, unsigned *out) { CHECK; *out = clock == 1 ? 1755 : 9; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t gpu, uint64_t *out) {
  CHECK;
  *out = get("FAKE_NVML_REASONS", 0);
  return 0;
}
int nvmlDeviceGetTotalEccErrors(device_t gpu, int type, int counter, uint64_t *out) {
  CHECK;
  *out = 100 * (counter == 1) + 10 * (type == 1) + gpu->number;
  return 0;
}
int nvmlDeviceGetPcieReplayCounter(device_t gpu, unsigned *out) { CHECK; *out = get("FAKE_NVML_REPLAYS", 7); return 0; }
#ifndef OLD
int nvmlDeviceGetTemperatureV(device_t gpu, struct { unsigned version; int sensor, temperature; } *out) {
  CHECK;
  out->temperature = 65 + gpu->number;
  return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(device_t gpu, uint64_t *out) {
  CHECK;
  *out = get("FAKE_NVML_REASONS", 0);
  return 0;
}
int nvmlDeviceGetRemappedRows(device_t gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  CHECK;
  *corrected = 1; *uncorrected = 2; *pending = 1; *failed = 0;
  return 0;
}
struct field { unsigned id, scope; int64_t timestamp, latency; unsigned type; int code; union { uint64_t whole; double real; } value; };
int nvmlDeviceGetFieldValues(device_t gpu, int count, struct field *values) {
  CHECK;
  for (int i = 0; i < count; i++) {
    values[i].code = values[i].id == 38 ? 3 : 0;
    values[i].value.whole = get("FAKE_NVML_LINK_ERRORS", 4);
  }
  return 0;
}
#endif
