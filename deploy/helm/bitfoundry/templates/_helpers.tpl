{{- define "bitfoundry.name" -}}
{{- if contains "bitfoundry" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-bitfoundry{{ end -}}
{{- end }}

{{/* The labels by which the pods of a part are found: a list of the root and the part's name. */}}
{{- define "bitfoundry.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: bitfoundry
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "bitfoundry.labels" -}}
{{- $root := index . 0 -}}
{{ include "bitfoundry.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* An image of ours: a list of the root and its name. */}}
{{- define "bitfoundry.image" -}}
{{- with (index . 0).Values.image -}}
image: {{ required "image.registry: name the registry and folder of your images, as registry.example.org/models" .registry }}/{{ index $ 1 }}:{{ .tag | default (index $ 0).Chart.AppVersion }}
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
{{- end }}

{{/* A value of a setting as text. Helm reads whole numbers as floats, which would be written as 1e+12. */}}
{{- define "bitfoundry.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . | quote }}{{ else }}{{ toString . | quote }}{{ end }}
{{- end }}

{{- define "bitfoundry.stopSeconds" -}}
{{ add .Values.stopGraceSeconds 60 }}
{{- end }}

{{- define "bitfoundry.fromSecret" -}}
valueFrom: {secretKeyRef: {name: {{ index . 0 | quote }}, key: {{ index . 1 }}}}
{{- end }}

{{/* The database, for the API, the workers and the migrations. The password is no part of the URL: it may have any
characters. */}}
{{- define "bitfoundry.databaseEnv" -}}
{{- $secret := required "database.secret: name a Secret with host, port, dbname, username and password" .Values.database.secret -}}
- name: PGHOST
  {{- include "bitfoundry.fromSecret" (list $secret "host") | nindent 2 }}
- name: PGPORT
  {{- include "bitfoundry.fromSecret" (list $secret "port") | nindent 2 }}
- name: PGDATABASE
  {{- include "bitfoundry.fromSecret" (list $secret "dbname") | nindent 2 }}
- name: PGUSER
  {{- include "bitfoundry.fromSecret" (list $secret "username") | nindent 2 }}
- name: PGPASSWORD
  {{- include "bitfoundry.fromSecret" (list $secret "password") | nindent 2 }}
{{- if .Values.database.caSecret }}
- {name: PGSSLMODE, value: verify-full}
- {name: PGSSLROOTCERT, value: /etc/bitfoundry/database/ca.crt}
{{- end }}
- {name: DATABASE_URL, value: "postgresql+psycopg://$(PGUSER)@$(PGHOST):$(PGPORT)/$(PGDATABASE)"}
{{- end }}

{{/* What the API and the workers share. */}}
{{- define "bitfoundry.env" -}}
{{- $secret := required "secret: name a Secret with secret-key, and valkey-password or broker-url" .Values.secret -}}
{{ include "bitfoundry.databaseEnv" . }}
{{- if .Values.valkey.enabled }}
- name: VALKEY_PASSWORD
  {{- include "bitfoundry.fromSecret" (list $secret "valkey-password") | nindent 2 }}
- {name: BROKER_URL, value: "redis://:$(VALKEY_PASSWORD)@{{ include "bitfoundry.name" . }}-valkey:6379/0"}
{{- else }}
- name: BROKER_URL
  {{- include "bitfoundry.fromSecret" (list $secret "broker-url") | nindent 2 }}
{{- end }}
- name: BITFOUNDRY_SECRET_KEY
  {{- include "bitfoundry.fromSecret" (list $secret "secret-key") | nindent 2 }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: hf-token, optional: true}}
- {name: BITFOUNDRY_DATA_DIR, value: /data}
- {name: BITFOUNDRY_MODEL_ROOTS, value: /models}
{{- if and .Values.ingress.enabled (not .Values.settings.BITFOUNDRY_PUBLIC_URL) }}
- {name: BITFOUNDRY_PUBLIC_URL, value: "http{{ if .Values.ingress.tlsSecret }}s{{ end }}://{{ .Values.ingress.host }}"}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ include "bitfoundry.text" $value }}}
{{- end }}
{{- end }}

{{/* No variables named after Services: they would begin with BITFOUNDRY_ as our settings do. And a first process that
reaps what engines leave behind: the pod's own, in place of ours. */}}
{{- define "bitfoundry.pod" -}}
enableServiceLinks: false
shareProcessNamespace: true
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "bitfoundry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "bitfoundry.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "bitfoundry.mounts" -}}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "bitfoundry.volumes" -}}
- name: data
  persistentVolumeClaim: {claimName: {{ .Values.data.existingClaim | default (printf "%s-data" (include "bitfoundry.name" .)) }}}
- name: tmp
  emptyDir: {sizeLimit: 8Gi}
{{- with .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "bitfoundry.databaseMounts" -}}
{{- if .Values.database.caSecret }}
- {name: database-ca, mountPath: /etc/bitfoundry/database, readOnly: true}
{{- end }}
{{- end }}

{{- define "bitfoundry.databaseVolumes" -}}
{{- with .Values.database.caSecret }}
- name: database-ca
  secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}
