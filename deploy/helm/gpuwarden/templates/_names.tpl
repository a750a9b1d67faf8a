{{- define "gpuwarden.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gpuwarden.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "gpuwarden.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpuwarden.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gpuwarden.selector" -}}
app.kubernetes.io/name: {{ include "gpuwarden.name" . | toJson }}
app.kubernetes.io/instance: {{ .Release.Name | toJson }}
{{- end -}}

{{- define "gpuwarden.labels" -}}
{{ include "gpuwarden.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | toJson }}
app.kubernetes.io/managed-by: {{ .Release.Service | toJson }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | toJson }}
{{- end -}}

{{- define "gpuwarden.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "gpuwarden.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "gpuwarden.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository: build the image (deploy/container/Containerfile) and push it to a registry of yours" $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s%s@%s" $repository (ternary (printf ":%s" $image.tag) "" (ne $image.tag "")) $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Whether the pod gets a token of the API: only for what respond may do. */}}
{{- define "gpuwarden.usesApi" -}}
{{- if or .Values.respond.cordon .Values.respond.deletePod }}true{{ end -}}
{{- end -}}

{{/* Whether the node's BPF file system is mounted to be written. */}}
{{- define "gpuwarden.pins" -}}
{{- if or (and .Values.enforce.enabled .Values.enforce.pin (not .Values.enforce.dryRun)) .Values.stoppedMap }}true{{ end -}}
{{- end -}}

{{/* The policy file's text; signing_key is added where a key is mounted and none is named. */}}
{{- define "gpuwarden.policyText" -}}
{{- $content := deepCopy .Values.policy.content -}}
{{- if and .Values.signingKey.existingSecret (not (hasKey $content "signing_key")) -}}
{{- $_ := set $content "signing_key" "/etc/gpuwarden-key/signing.pem" -}}
{{- end -}}
{{- toYaml $content -}}
{{- end -}}
