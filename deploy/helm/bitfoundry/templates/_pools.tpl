{{/* Refuse fields that mean nothing for a pool: a list of its name and its values. */}}
{{- define "bitfoundry.checkPool" -}}
{{- $pool := index . 0 }}{{ $values := index . 1 -}}
{{- if and (eq $values.device "cpu") $values.gpus }}
{{- fail (printf "pools.%s.gpus: a pool of device cpu has none; remove it, or use device cuda or rocm" $pool) }}
{{- else if and (ne $values.device "cpu") (not $values.gpus) }}
{{- fail (printf "pools.%s.gpus: give the number of GPUs of each worker (1 or more), or use device cpu" $pool) }}
{{- else if and (eq $values.launcher "local") (or (gt (int $values.slots) 1) $values.jobLabels) }}
{{- fail (printf "pools.%s: slots and jobLabels are for launcher kubernetes; for more jobs at once, use more replicas" $pool) }}
{{- end }}
{{- end }}

{{/* Where engines run: the worker's own pod, or the pods of the launcher. */}}
{{- define "bitfoundry.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "bitfoundry.gpus" -}}
{{- if .gpus -}}
{{ if eq .device "cuda" }}nvidia.com/gpu{{ else }}amd.com/gpu{{ end }}: {{ .gpus }}
{{- end }}
{{- end }}

{{/* The pod has 2 GiB more than its jobs, for the worker, its publications and shared memory. So the worker ends an
attempt that takes too much, and says why, before the kernel ends the whole pod. */}}
{{- define "bitfoundry.engineResources" -}}
{{- $memory := printf "%dGi" (add .memoryGiB 2) -}}
requests: {cpu: {{ .cpus }}, memory: {{ $memory }}}
limits:
  memory: {{ $memory }}
  {{- with include "bitfoundry.gpus" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The processes of several GPUs pass data through /dev/shm, which is 64 MB otherwise. */}}
{{- define "bitfoundry.sharedMemoryMount" -}}
{{- if gt (int .gpus) 1 }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- end }}

{{- define "bitfoundry.sharedMemoryVolume" -}}
{{- if gt (int .gpus) 1 }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: 8Gi}
{{- end }}
{{- end }}

{{/* The template of the launcher's Jobs: a list of the root, the pool's name and its values. The launcher adds the name,
the command, the memory and the cores of the plan, and the number of pods. */}}
{{- define "bitfoundry.engineJob" -}}
{{- $root := index . 0 }}{{ $pool := index . 1 }}{{ $values := index . 2 -}}
apiVersion: batch/v1
kind: Job
metadata:
  labels:
    {{- include "bitfoundry.selector" (list $root "engine") | nindent 4 }}
    bitfoundry.dev/pool: {{ $pool }}
    {{- with $values.jobLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  template:
    metadata:
      labels:
        {{- include "bitfoundry.selector" (list $root "engine") | nindent 8 }}
        bitfoundry.dev/pool: {{ $pool }}
    spec:
      automountServiceAccountToken: false
      {{- include "bitfoundry.pod" $root | nindent 6 }}
      {{- include "bitfoundry.placement" $values | nindent 6 }}
      securityContext:
        {{- include "bitfoundry.podSecurity" $root | nindent 8 }}
        {{- with $values.supplementalGroups }}
        supplementalGroups: {{ toJson . }}
        {{- end }}
      terminationGracePeriodSeconds: {{ include "bitfoundry.stopSeconds" $root }}
      containers:
        - name: engine
          {{- include "bitfoundry.image" (list $root (printf "bitfoundry-worker-%s" $values.device)) | nindent 10 }}
          {{- if $values.gpus }}
          resources:
            limits:
              {{- include "bitfoundry.gpus" $values | nindent 14 }}
          {{- end }}
          {{- include "bitfoundry.containerSecurity" $root | nindent 10 }}
          volumeMounts:
            {{- include "bitfoundry.mounts" $root | nindent 12 }}
            {{- include "bitfoundry.sharedMemoryMount" $values | nindent 12 }}
      volumes:
        {{- include "bitfoundry.volumes" $root | nindent 8 }}
        {{- include "bitfoundry.sharedMemoryVolume" $values | nindent 8 }}
{{- end }}
