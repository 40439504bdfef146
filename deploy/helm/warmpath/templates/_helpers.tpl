{{- define "warmpath.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "warmpath.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "warmpath.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "warmpath.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "warmpath.selector" -}}
app.kubernetes.io/name: {{ include "warmpath.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "warmpath.labels" -}}
{{ include "warmpath.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: warmpath
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "warmpath.image" -}}
{{- $image := .image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "warmpath.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "warmpath.fullname" .) }}
{{- end }}

{{- define "warmpath.secret" -}}
{{- .Values.secret.existingSecret | default (include "warmpath.fullname" .) }}
{{- end }}

{{- define "warmpath.configMap" -}}
{{- .Values.existingConfigMap | default (printf "%s-policy" (include "warmpath.fullname" .)) }}
{{- end }}

{{- define "warmpath.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "warmpath.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
